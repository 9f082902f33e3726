"""A model that already contains factors says so everywhere, and every verb and function refuses more."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lpes_jax as lj
from lpes_jax.cli import VERBS
from lpes_jax.export import ExportSettings, run_export
from lpes_jax.gains import fold_gains
from lpes_jax.mark import GGUF_KEY, KEY, Mark
from lpes_jax.methods.tables import lpes
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint, save_llama
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.gguf_model import llama_config
from lpes_jax.prefixes import pack_rows
from lpes_jax.ship.gguf_patch import patch_gguf

sys.path.append(str(Path(__file__).parent.parent / "ship"))
from tiny_gguf import write_model  # noqa: E402

pytestmark = pytest.mark.promotes
GAINS = lj.LayerFactors(np.ones(3), gains=np.array([0.5, 1.5, 2.0]))
OF_GGUF = lj.LayerFactors(np.ones(2), gains=np.array([0.5, 1.5]))  # of its two layers
TASK = ["--num-pairs", "2", "--key-length", "1", "--positions", "0", "--limit", "1"]


@pytest.fixture(scope="module")
def folded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mark") / "folded"
    save_llama(fold_gains(lj.load_model(str(model_folder), "float32"), GAINS), folder)
    for file in model_folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    GAINS.save(folder.parent / "f.json")
    lj.LayerFactors(np.ones(3), gains=np.ones(3)).save(folder.parent / "ones.json")
    return folder


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .gguf file that contains gains, and factors for it."""
    folder = tmp_path_factory.mktemp("patched")
    patch_gguf(write_model(folder / "m.gguf", context_length=2048), folder / "m-lpes.gguf", OF_GGUF)
    OF_GGUF.save(folder / "f.json")
    lj.LayerFactors(np.ones(2), gains=np.ones(2)).save(folder / "ones.json")
    return folder / "m-lpes.gguf"


def refused(call: Any, *arguments: Any, **more: Any) -> None:
    with pytest.raises(
        lj.UserError, match=f"the model already contains factors of sha256 {GAINS.sha256[:8]}.*; use"
    ) as refusal:
        call(*arguments, **more)
    assert "\n" not in str(refusal.value)


def test_every_door_of_python(folded):
    model, tokenizer = lj.load_model(str(folded), "float32"), lj.load_tokenizer(str(folded))
    plain = lj.logits(model, [[1, 2, 3]])
    for given in (GAINS, np.array([1.0, 1.0, 1.1])):
        refused(lj.logits, model, [[1, 2]], given)
        refused(lj.generate, model, tokenizer, ["ab"], given)
    refused(lj.logits, model, [[1, 2]], gains=np.full(3, 1.1))
    refused(jax.jit(lambda factors: lj.logits(model, jnp.ones((1, 2), jnp.int32), factors)), jnp.ones(3))
    refused(lj.population_scores, model, pack_rows([([1, 1], [1])]), jnp.full((2, 3), 1.1))
    refused(fold_gains, model, GAINS)
    refused(lpes(GAINS), model.config, 8)
    refused(lj.run_search, lj.SearchSettings.of(model=str(folded), output_path=folded.parent / "search"))
    # Factors of 1 change nothing: it is a model like any other.
    np.testing.assert_array_equal(lj.logits(model, [[1, 2, 3]], lj.LayerFactors(np.ones(3), gains=np.ones(3))), plain)
    assert lpes(lj.LayerFactors(np.ones(3)))(model.config, 8).tables.gains.shape[1] == 3


@pytest.mark.parametrize(
    "form, sha256", [("folded", GAINS.sha256), pytest.param("patched", OF_GGUF.sha256, marks=pytest.mark.long)]
)
def test_every_verb(request, form, sha256, capsys, monkeypatch):
    folder = request.getfixturevalue(form)
    monkeypatch.chdir(folder.parent)
    model = ["--model", str(folder)]

    def run(verb: str, *arguments: str) -> int:
        return import_module(VERBS[verb]).main([*model, *arguments])

    def says_no(verb: str, *arguments: str) -> None:
        assert run(verb, *arguments) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and f"the model already contains factors of sha256 {sha256[:8]}" in said[0], said
        assert not (folder.parent / "out").exists()

    given = ["--factors", "f.json", "--output-path", "out"]
    says_no("evaluate", *given, *TASK)
    says_no("compare", *given, *TASK)
    says_no("profile", *given)
    for to in ("hf", "hf-hook", *(["gguf"] if form == "patched" else [])):
        says_no("export", *given, "--to", to)
    says_no("search", "--initial-factors", "f.json", "--output-path", "out", *TASK)
    says_no("search", "--output-path", "out", *TASK)
    # Without factors it is evaluated, and the results say what it holds.
    for more in ([], ["--factors", "ones.json"]):
        assert run("evaluate", "--output-path", "out", "--overwrite", *more, *TASK) == 0
        record = json.loads((folder.parent / "out" / "results.json").read_text())
        assert record["config"]["model_identity"]["mark"] == Mark(sha256, gains="query weights").record
    capsys.readouterr()
    assert run("doctor", "--num-tokens", "20") == 0
    assert f"in the files: factors of sha256 {sha256[:8]} (gains in query weights)" in " ".join(capsys.readouterr().out.split())


def test_a_folder_with_code_of_its_own(model_folder, tmp_path, capsys):
    """lpes_jax does not run modeling_lpes.py: it names the mark, and not only the unknown type of model."""
    found = lj.LayerFactors(np.array([1.0, 1.5, 2.0]), gains=GAINS.gains)
    found.save(tmp_path / "f.json")
    paths = {"factors": tmp_path / "f.json", "output_path": tmp_path / "coded"}
    coded = run_export(ExportSettings.of(model=str(model_folder), **paths, no_self_test=True))
    capsys.readouterr()
    holds = (
        f"the model already contains factors of sha256 {found.sha256[:8]} (gains in query weights, rates in modeling_lpes.py)"
    )
    for verb in VERBS:
        more = [] if verb == "doctor" else ["--output-path", str(tmp_path / "out")]
        more += ["--factors", str(tmp_path / "f.json")] if verb == "export" else []
        assert import_module(VERBS[verb]).main(["--model", str(coded), *more]) == 2
        [said] = capsys.readouterr().err.strip().splitlines()
        assert holds in said and said.endswith("use the model that it was exported from"), verb
    with pytest.raises(lj.UserError, match="model_type 'lpes_llama'"):
        lj.load_model(str(coded))
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from lpes_jax.torch import apply_layer_factors

    model = AutoModelForCausalLM.from_pretrained(coded, trust_remote_code=True)
    with pytest.raises(ValueError, match=f"the model already contains factors .sha256 {found.sha256[:8]}."):
        apply_layer_factors(model, GAINS)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
def test_the_harness(folded):
    from lpes_jax.lm_eval import LayerFactorsLM

    refused(LayerFactorsLM, str(folded), dtype="float32", factors=str(folded.parent / "f.json"))


def test_the_hook(folded):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from lpes_jax.torch import apply_layer_factors

    reference = AutoModelForCausalLM.from_pretrained(folded)
    for given in (GAINS, None):
        with pytest.raises(ValueError, match=f"the model already contains factors .sha256 {GAINS.sha256[:8]}."):
            apply_layer_factors(reference, given)


def test_the_mark_survives_formats_and_what_is_no_mark_is_refused(folded, tmp_path):
    checkpoint = open_checkpoint(folded)
    mark = checkpoint.config.mark
    assert mark == Mark(GAINS.sha256, gains="query weights")
    save_llama(load_llama(checkpoint, "float32"), tmp_path / "again")
    assert open_checkpoint(tmp_path / "again").config.mark == mark
    config = json.loads((folded / "config.json").read_text())
    for bad in (3, [], {}, {"factors_sha256": 1}, {"factors_sha256": "a", "other": 1}, "{"):
        with pytest.raises(lj.UserError, match=f"x: {KEY} is not a mark .*; export the model again"):
            lj.LlamaConfig.from_hf(config | {KEY: bad}, "x")
    assert lj.LlamaConfig.from_hf(config | {KEY: None}).mark is None
    # Records of runs hash a config's repr: it is as it was before there were marks.
    assert "mark" not in repr(checkpoint.config) and replace(checkpoint.config, mark=None) != checkpoint.config


def test_a_gguf_file_says_it_too(tmp_path):
    mark = Mark("a" * 64, gains="query weights", rates="rope_freqs.weight")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    keys = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 2}
    for key, value in keys.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_string(GGUF_KEY, mark.gguf)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert llama_config(GgufFile.open(tmp_path / "m.gguf")).mark == mark
