"""The verb doctor: its output for known models, and its exit codes."""

import json
import shutil

import pytest
from tokenizers import AddedToken

import lpes_jax as lj
from lpes_jax import doctor
from lpes_jax.doctor.__main__ import main
from lpes_jax.models import zoo
from lpes_jax.models.llama import load
from lpes_jax.models.llama.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the bundled model that a test may change."""
    copy = tmp_path_factory.mktemp("doctor") / "model"
    shutil.copytree(zoo.resolve("tiny-retriever"), copy)
    return copy


def test_a_sound_model_passes(capsys):
    pytest.importorskip("torch")
    assert main(["--num-tokens", "100", "--compare-with-transformers"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok") >= 7 and "FAILED" not in out
    for fact in ("llama", "6, 3 key-value heads, head dim 32", "default, theta 10,000", "92 read", "<|endoftext|>"):
        assert fact in out


def test_facts_are_those_of_the_files(folder):
    config = json.loads((folder / "config.json").read_text())
    scaled = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 512}
    changed = config | {"rope_parameters": scaled, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(changed))
    loaded = load(str(folder), "bfloat16")
    facts = dict(doctor.parsed_config(open_checkpoint(folder), loaded))
    (folder / "config.json").write_text(json.dumps(config))
    assert facts["RoPE"].startswith("yarn, theta 500,000, factor 4.0, original_max_position_embeddings 512")
    assert facts["context"] == "4,096 tokens, sliding window: none"
    assert facts["KV cache"] == f"{2 * 10 * 3 * 32 * 2:,} bytes per token"
    assert "bfloat16" in facts["runs on"] and facts["weights"].startswith("4,114,368: float32 16 MiB, float16 8 MiB")


def test_a_failed_check_is_exit_code_1(folder, capsys):
    tokenizer = lj.load_tokenizer(str(folder))
    tokenizer.add_tokens([AddedToken(f"<extra{i}>") for i in range(10)])  # 289 tokens for 288 rows of the embedding
    tokenizer.save_pretrained(folder)
    assert main(["--model", str(folder), "--num-tokens", "20"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 1


@pytest.mark.long
def test_bfloat16_passes_too(capsys):
    assert main(["--dtype", "bfloat16", "--num-tokens", "200"]) == 0


@pytest.mark.parametrize("mistake", [["--model", "no-such-model"], ["--num-tokens", "2"], ["--dtype", "int4"]])
def test_mistakes_are_exit_code_2(mistake, capsys):
    assert main(mistake) == 2
    assert capsys.readouterr().err.startswith("error: ")
