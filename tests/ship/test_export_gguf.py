"""`export --to gguf`: the folder that it writes, and what it refuses."""

import hashlib
import json

import jax
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from schemas import check_folder
from tiny_gguf import HEAD_DIM, write_model

from lpes_jax.api import logits
from lpes_jax.errors import UserError
from lpes_jax.export import ExportSettings, run_export
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import fold_gains
from lpes_jax.mark import Mark
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.ship.self_test import longest_searched

GAINS = np.random.default_rng(0).uniform(0.5, 2, (2, HEAD_DIM // 2))
FOUND = LayerFactors(np.ones(2), gains=GAINS, gains_granularity="layer_band")


@pytest.fixture
def settings(tmp_path):
    write_model(tmp_path / "m.Q4.gguf", "qwen2")
    FOUND.save(tmp_path / "f.json")
    paths = {"factors": tmp_path / "f.json", "output_path": tmp_path / "out"}
    return ExportSettings.of(model=str(tmp_path / "m.Q4.gguf"), **paths, to="gguf", no_self_test=True)


def test_a_folder_with_the_patched_file(settings, tmp_path, capsys):
    before = hashlib.sha256((tmp_path / "m.Q4.gguf").read_bytes()).hexdigest()
    (tmp_path / "m.gguf").symlink_to("m.Q4.gguf")
    folder = run_export(settings.replace(model=str(tmp_path / "m.gguf")))
    assert {"m-lpes.gguf", "factors.json", "exported.json"} <= {path.name for path in folder.iterdir()}
    patched = folder / "m-lpes.gguf"
    assert not patched.is_symlink() and hashlib.sha256((tmp_path / "m.Q4.gguf").read_bytes()).hexdigest() == before
    assert open_checkpoint(patched).config.mark == Mark(FOUND.sha256, gains="query weights")
    record = json.loads((folder / "exported.json").read_text())
    assert (record["to"], record["model"]["sha256"], record["factors"]["sha256"]) == ("gguf", before, FOUND.sha256)
    said = capsys.readouterr().out
    assert "gains: in 4 tensors (4 of type F32)" in said and f"llama-cli -m {patched}" in said
    wanted = fold_gains(load_llama(open_checkpoint(tmp_path / "m.gguf"), "float32"), FOUND).layers
    found = load_llama(open_checkpoint(patched), "float32").layers
    for name in ("query", "query_bias"):
        np.testing.assert_array_equal(getattr(found, name)[...], getattr(wanted, name)[...])


def test_the_expected_answers_of_a_server_are_beside_the_file(settings, tmp_path):
    """Along prompts up to the longest that was searched: log-probabilities of the patched file, and of the source."""
    LayerFactors(np.ones(2), gains=GAINS, gains_granularity="layer_band", search={"longest_tokens": 100}).save(
        tmp_path / "f.json"
    )
    folder = run_export(settings.replace(no_self_test=False))
    assert not (folder / "self_test.py").exists()  # which is for transformers
    record = json.loads((folder / "self_test.json").read_text())
    check_folder(folder, "exported.json", "factors.json", "self_test.json")
    lengths = [len(prompt["ids"]) for prompt in record["prompts"]]
    assert record["notices_a_plain_model"] and len({prompt["fact_at_percent"] for prompt in record["prompts"]}) == 5
    assert max(lengths) == 100 and min(lengths) < 30
    for path, key in ((folder / "m.Q4-lpes.gguf", "log_probs"), (tmp_path / "m.Q4.gguf", "plain_log_probs")):
        model = load_llama(open_checkpoint(path), "float32")
        for prompt in record["prompts"]:
            rows = jax.nn.log_softmax(logits(model, [prompt["ids"] + [0] * (100 - len(prompt["ids"]))])[0])  # of one shape
            for point in prompt["points"]:
                found = np.asarray(rows[point["tokens"] - 1])[point["ids"]]
                np.testing.assert_allclose(found, point[key], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "search, pairs",
    [
        ({"num_pairs": 12}, 12),
        ({"num_pairs": [5, 20]}, 20),
        ({"num_pairs": "5:20"}, 20),
        ({"num_pairs": ["5:10", 7]}, 10),
        ({"num_pairs": None, "mixture": {"a": {"num_pairs": 5}, "b": {"num_pairs": "5:15"}, "c": {"num_lines": 3}}}, 15),
    ],
)
def test_the_longest_prompt_of_older_files_is_that_of_most_pairs(search, pairs):
    tokenizer, gains = byte_tokenizer(), np.ones(2)
    longest = longest_searched(LayerFactors(gains, search=search), tokenizer)
    assert longest == longest_searched(LayerFactors(gains, search={"num_pairs": pairs}), tokenizer)
    assert longest > longest_searched(LayerFactors(gains, search={"num_pairs": pairs - 1}), tokenizer)
    assert longest_searched(LayerFactors(gains, search=search | {"longest_tokens": 77}), tokenizer) == 77
    assert longest_searched(LayerFactors(gains, search={"num_pairs": True, "mixture": "m.toml"}), tokenizer) == 1024


def test_an_export_is_replaced_only_with_overwrite(settings, tmp_path):
    patched = run_export(settings) / "m.Q4-lpes.gguf"
    first = patched.read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        run_export(settings)
    LayerFactors(np.ones(2), gains=GAINS[::-1].copy(), gains_granularity="layer_band").save(tmp_path / "f.json")
    run_export(settings.replace(overwrite=True))
    assert patched.read_bytes() != first
    with pytest.raises(UserError, match="contains the model to export"):
        run_export(settings.replace(overwrite=True, model=str(patched)))
    assert patched.exists()


def test_what_it_refuses_leaves_nothing(settings, tmp_path, model_folder):
    there = sorted(path.name for path in tmp_path.iterdir())
    LayerFactors(np.array([1.0, 1.5]), model={}).save(tmp_path / "f.json")
    with pytest.raises(UserError, match="differ by layer or KV group.*--to hf-hook"):
        run_export(settings)
    LayerFactors(np.ones(3)).save(tmp_path / "f.json")
    with pytest.raises(UserError, match="--to gguf copies a .gguf file, and --model .* is a folder; give --to hf"):
        run_export(settings.replace(model=str(model_folder)))
    assert sorted(path.name for path in tmp_path.iterdir()) == there
