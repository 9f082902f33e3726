"""`export --to hf`: folders that contain their factors, in transformers against our own logits, live if torch is installed."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.export import ExportSettings, run_export
from lpes_jax.mark import KEY
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.models.llama.model import hidden_states, output_logits
from lpes_jax.rope import RopeTable
from lpes_jax.ship.folded import fold_files
from lpes_jax.ship.hf import longrope

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS), str(TESTS / "models")]
from byte_tokenizer import byte_tokenizer  # noqa: E402
from family_models import FAMILIES, ROPES, hf_config, weights_of, write_folder  # noqa: E402

CLOSE, ATTENTION = 1e-4, {"attn_implementation": "eager"}
IDS = [np.random.RandomState(3).randint(3, 128, 14).tolist()]
rng = np.random.default_rng(0)
GAINS = {"gains": rng.uniform(0.4, 2.5, (4, 2)), "gains_granularity": "layer_band"}
SHARED = np.tile(rng.uniform(0.5, 2, (1, 2)), (4, 1))
BANDS = np.where(np.eye(4, 2) > 0, np.inf, rng.uniform(0.5, 2, (4, 2)))
GROUPS = rng.uniform(0.5, 2, (4, 2, 2))
FOUND = {
    "gains": lj.LayerFactors(np.ones(4), **GAINS),
    "gains of groups": lj.LayerFactors(np.ones(4), gains=GROUPS, gains_granularity="layer_group_band"),
    "shared": lj.LayerFactors(SHARED, "layer_band", **GAINS),
    "bands": lj.LayerFactors(BANDS, "layer_band", **GAINS),
    "groups": lj.LayerFactors(GROUPS, "layer_group_band"),
}


def exported(source: Path, factors: lj.LayerFactors, target: Path, **more: Any) -> Path:
    factors.save(source.parent / "f.json")
    settings = {"no_self_test": True} | more
    return run_export(ExportSettings.of(model=str(source), factors=source.parent / "f.json", output_path=target, **settings))


def source_of(folder: Path, family: str, rope: str = "default") -> Path:
    write_folder(folder, hf_config(family, rope, vocab_size=300))
    byte_tokenizer().save_pretrained(folder)
    return folder


@jax.jit
def _ours(model: lj.Llama, tokens: jax.Array, table: RopeTable) -> jax.Array:
    return output_logits(model, hidden_states(model, tokens, table))


def ours(model: lj.Llama, factors: lj.LayerFactors | None) -> np.ndarray:
    """Logits with a table that has a row for each KV group, so that all factors of a model are one compiled program."""
    config = model.config
    table, shape = config.rope_table(len(IDS[0]), factors), (config.num_layers, config.num_kv_heads, config.rotary_dim // 2)
    wide = replace(table, inv_freq=jnp.broadcast_to(table.inv_freq, shape), gains=jnp.broadcast_to(table.gains, shape))
    return np.asarray(_ours(model, jnp.array(IDS), wide))


def in_torch(folder: Path, **more: Any) -> tuple[Any, np.ndarray]:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **ATTENTION, **more).eval()
    with torch.no_grad():
        return model, model(torch.tensor(IDS), use_cache=False).logits.numpy()


@pytest.mark.parametrize("family", mostly_long(FAMILIES, "qwen3", "phi3-partial"))
def test_every_family(tmp_path, family):
    source = source_of(tmp_path / "source", family)
    model = load_llama(open_checkpoint(source), "float32")
    reference, plain = in_torch(source)
    import lpes_jax.torch as lpes_torch

    for name, factors in FOUND.items():
        if family == "qwen3" and name == "gains of groups":
            with pytest.raises(lj.UserError, match="gains of KV groups cannot be folded into the weights"):
                exported(source, factors, tmp_path / name)
            assert not (tmp_path / name).exists()
            continue
        folder, coded = exported(source, factors, tmp_path / name), name in ("bands", "groups")
        loaded, found = in_torch(folder, **({"trust_remote_code": True} if coded else {}))
        assert (type(loaded).__name__ == "LpesForCausalLM") == coded == (folder / "modeling_lpes.py").exists()
        np.testing.assert_allclose(found, ours(model, factors), rtol=0, atol=CLOSE)
        assert np.abs(found - plain).max() > 100 * CLOSE
        if coded:
            with lpes_torch.apply_layer_factors(reference, factors):
                hooked = in_torch_logits(reference)
            np.testing.assert_allclose(found, hooked, rtol=0, atol=0 if factors.gains is None else 1e-5 * np.abs(hooked).max())


def in_torch_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(IDS), use_cache=False).logits.numpy()


@pytest.mark.parametrize(
    "rope", mostly_long([rope for rope in ROPES if rope != "default"], "dynamic", "llama3", "longrope", "yarn-mscale")
)
def test_every_rope_kind(tmp_path, rope):
    """A window of 8 tokens and 14 ids: `dynamic` and `longrope` are beyond theirs."""
    source = source_of(tmp_path / "source", "llama", rope)
    model = load_llama(open_checkpoint(source), "float32")
    for name in ("shared", "bands"):
        folder = exported(source, FOUND[name], tmp_path / name)
        plainly = json.loads((folder / "config.json").read_text())["model_type"] == "llama"
        assert plainly == (name == "shared" and rope in ("linear", "llama3"))
        found = in_torch(folder, trust_remote_code=True)[1]
        np.testing.assert_allclose(found, ours(model, FOUND[name]), rtol=0, atol=CLOSE)
        if plainly:  # and we read it as transformers does
            np.testing.assert_allclose(ours(load_llama(open_checkpoint(folder), "float32"), None), found, rtol=0, atol=CLOSE)


def test_without_trust_it_fails_and_saved_again_it_is_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    folder = exported(source_of(tmp_path / "source", "llama"), FOUND["groups"], tmp_path / "out")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    with pytest.raises(KeyError, match="lpes"):  # by the family's own class, which asks for no trust
        transformers.LlamaForCausalLM.from_pretrained(folder)
    model, logits = in_torch(folder, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    again, found = in_torch(tmp_path / "again", trust_remote_code=True)
    np.testing.assert_array_equal(found, logits)
    with pytest.raises(KeyError, match="lpes"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    # A cache and left padding: what one pass without either gives.
    rows = [IDS[0][:9], IDS[0]]
    tokens = torch.tensor([[0] * (14 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (14 - len(row)) + [1] * len(row) for row in rows])
    again.generation_config = transformers.GenerationConfig(pad_token_id=0)
    new = again.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)[:, 14:].tolist()
    for row, more in zip(rows, new, strict=True):
        with torch.no_grad():
            whole = again(torch.tensor([row + more]), use_cache=False).logits[0, len(row) - 1 : -1]
        assert whole.argmax(-1).tolist() == more
    # What lost its factors, or has them in 16 bits, says so.
    again.model.rotary_emb.multipliers.fill_(1.0)
    again.model.rotary_emb.is_checked = False
    with pytest.raises(RuntimeError, match="the factors of LPES were lost"):
        in_torch_logits(again)
    with pytest.raises(RuntimeError, match="frequencies in torch.bfloat16: load with dtype"):
        in_torch_logits(again.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_shards_keep_precision_and_links_are_not_written_through(tmp_path, dtype, capsys):
    """Two linked shards: one has all queries of the first two layers, the other those of the last."""
    blobs, source = tmp_path / "blobs", tmp_path / "source"
    blobs.mkdir()
    config = hf_config("qwen2", "default", vocab_size=300)
    source_of(source, "qwen2")
    (source / "model.safetensors").unlink()
    weights = {name: values.astype(dtype) for name, values in weights_of(config).items()}
    parts = [{}, {}, {}]
    for name, values in weights.items():
        parts[2 if "embed" in name else int(".layers.2" in name or ".layers.3" in name)][name] = values
    for number, part in enumerate(parts):
        save_file(part, blobs / f"b{number}", metadata={"format": "pt", "note": "kept"})
        (source / f"s{number}.safetensors").symlink_to(blobs / f"b{number}")
    names = {name: f"s{number}.safetensors" for number, part in enumerate(parts) for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in blobs.iterdir()}
    folder = exported(source, FOUND["gains"], tmp_path / "out")
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in blobs.iterdir()} == before
    assert [(folder / f"s{number}.safetensors").is_symlink() for number in range(3)] == [False, False, True]
    gains = np.concatenate([np.repeat(GAINS["gains"], 2, axis=1)] * 2, axis=1).astype(np.float32)  # of a head's 8 elements
    for number, part in enumerate(parts):
        new, old = (folder / f"s{number}.safetensors").read_bytes(), (blobs / f"b{number}").read_bytes()
        header = 8 + int.from_bytes(old[:8], "little")
        assert new[:header] == old[:header] and len(new) == len(old)
        found = load_file(folder / f"s{number}.safetensors")
        for name, values in part.items():
            if "q_proj" not in name:
                np.testing.assert_array_equal(found[name], values)
                continue
            row_logits = np.tile(gains[int(name.split(".")[2])], 4).reshape(-1, *[1] * (values.ndim - 1))
            np.testing.assert_array_equal(found[name], (values.astype(np.float32) * row_logits).astype(dtype))
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[np.dtype(dtype).name]
    assert f"gains: in 8 tensors (8 of type {kind}); rounding moves a row by" in capsys.readouterr().out
    mark = json.loads((folder / "config.json").read_text())[KEY]
    assert mark == {"factors_sha256": FOUND["gains"].sha256, "gains": "query weights", "rates": None}
    with pytest.raises(lj.UserError, match="the model already contains factors"):
        exported(folder, FOUND["gains"], tmp_path / "twice")


def test_gains_that_overflow_float16_are_refused(tmp_path):
    source = source_of(tmp_path / "source", "llama")
    weights = {name: values.astype(np.float16) for name, values in load_file(source / "model.safetensors").items()}
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = 60_000
    save_file(weights, source / "model.safetensors")
    factors = lj.LayerFactors(np.ones(4), gains=np.full(4, 2.0))
    with pytest.raises(lj.UserError, match="layers.1.self_attn.q_proj.weight is of float16, which overflows with these"):
        exported(source, factors, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert fold_files(source, open_checkpoint(source).config, lj.LayerFactors(np.ones(4), gains=np.ones(4))).most == 0


def test_which_factors_a_plain_folder_can_have():
    smollm3 = lj.LlamaConfig.from_hf(hf_config("smollm3", "default"))
    rates = np.array([1.5, 1.5, 1.5, 1.0])  # the last layer has no RoPE
    keys = longrope(smollm3, lj.LayerFactors(rates))
    assert keys is not None and keys["rope_scaling"]["short_factor"] == [1.5] * 4 == keys["rope_scaling"]["long_factor"]
    assert keys["rope_scaling"]["original_max_position_embeddings"] == smollm3.max_position_embeddings
    assert longrope(lj.LlamaConfig.from_hf(hf_config("llama", "default")), lj.LayerFactors(rates)) is None
    standing = longrope(smollm3, lj.LayerFactors(np.tile([[1.0, np.inf]], (4, 1)), "layer_band"))
    assert standing is not None and standing["rope_scaling"]["long_factor"][-1] == 1e14


@pytest.mark.parametrize("name", mostly_long(["gains", "shared", "bands"], "shared"))
def test_the_self_test_agrees_and_notices_a_plain_model(tmp_path, model_folder, capsys, name):
    factors = {
        "gains": lj.LayerFactors(np.ones(3), gains=np.array([0.3, 2.0, 2.5]), search={"longest_tokens": 200}),
        "shared": lj.LayerFactors(np.full(3, 1.4), search={"longest_tokens": 200}),
        "bands": lj.LayerFactors(np.array([0.6, 1.5, 2.0]), search={"longest_tokens": 200}),
    }[name]
    factors.save(tmp_path / "f.json")
    folder = run_export(ExportSettings.of(model=str(model_folder), factors=tmp_path / "f.json", output_path=tmp_path / "out"))
    record = json.loads((folder / "self_test.json").read_text())
    lengths = [len(prompt["ids"]) for prompt in record["prompts"]]
    assert max(lengths) <= 200 and max(lengths) > 150 and min(lengths) < 50 and record["notices_a_plain_model"]
    assert record["plain_is_off_by"]["most"] > 10 * record["tolerance"] > 100 * record["rounding"]["most"]
    model = lj.load_model(str(model_folder), "float32")
    for prompt in record["prompts"][::2]:  # what stands there is what the original gives, with the factors and without
        for given, key in ((factors, "log_probs"), (None, "plain_log_probs")):
            logits = jax.nn.log_softmax(lj.logits(model, [prompt["ids"]], given)[0])
            for point in prompt["points"][::3]:
                row = np.asarray(logits[point["tokens"] - 1])[point["ids"]]
                np.testing.assert_allclose(row, point[key], rtol=0, atol=1e-3)
    pytest.importorskip("torch")
    if name != "gains":
        from lpes_jax.ship.check_in_transformers import run

        assert run(folder)
        assert "with a KV cache: equal" in capsys.readouterr().out
        return
    code = (  # where neither jax nor lpes_jax is
        "import runpy, sys\n"
        f"try: runpy.run_path({str(folder / 'self_test.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(9 if {'jax', 'jaxlib', 'lpes_jax'} & sys.modules.keys() else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same ids" in done.stdout and "with a KV cache: equal" in done.stdout
    (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())  # as if they were not there
    from lpes_jax.ship.check_in_transformers import run

    assert not run(folder)
    assert "THE MODEL WITHOUT THE FACTORS IS NEARER" in capsys.readouterr().out


def test_factors_too_weak_to_notice_are_said_to_be(tmp_path, model_folder, capsys):
    lj.LayerFactors(np.array([1.0, 1.0, 1.00001]), search={"longest_tokens": 60}).save(tmp_path / "f.json")
    folder = run_export(ExportSettings.of(model=str(model_folder), factors=tmp_path / "f.json", output_path=tmp_path / "out"))
    assert not json.loads((folder / "self_test.json").read_text())["notices_a_plain_model"]
    assert "cannot tell the model from one without them" in " ".join(capsys.readouterr().out.split())
