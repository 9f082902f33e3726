"""The exported folder and its torch module against our own logits, live with torch: families, RoPE kinds, granularities."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import mostly_long
from tokenizers.pre_tokenizers import ByteLevel

import lpes_jax as lj
from lpes_jax.export import ExportSettings, run_export
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.models.llama.config import SUPPORTED_MODEL_TYPES, LlamaConfig
from lpes_jax.models.llama.gguf_model import TENSOR_NAMES
from lpes_jax.models.llama.model import hidden_states, output_logits
from lpes_jax.models.llama.tokenizer import load_tokenizer, stop_ids
from lpes_jax.rope import GRANULARITIES, RopeTable

sys.path.append(str(Path(__file__).parent / "models"))
from family_models import FAMILIES, ROPES, hf_config, weights_of, write_folder  # noqa: E402

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

import lpes_jax.torch as lpes_torch  # noqa: E402

CLOSE, LENGTHS, NEW = 1e-4, (12, 7), 4
SHAPES = {"layer": (4,), "layer_band": (4, 2), "layer_group": (4, 2), "layer_group_band": (4, 2, 2)}  # L 4, K 2, 2 bands


def factors_of(granularity: str) -> lj.LayerFactors:
    return lj.LayerFactors(np.random.default_rng(0).uniform(0.5, 2.5, SHAPES[granularity]), granularity)


def torch_model(folder: Path) -> Any:
    torch.set_num_threads(1)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def left_padded(rows: list[list[int]]) -> dict[str, Any]:
    longest = max(map(len, rows))
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]), "attention_mask": mask}


ROWS = [np.random.RandomState(n).randint(3, 128, n).tolist() for n in LENGTHS]


def in_torch(model: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    """A left-padded batch, generated with a KV cache: each row with its new tokens, and the logits of these, [NEW, V]."""
    batch = left_padded(ROWS)
    out = model.generate(**batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
    new = out.sequences[:, batch["input_ids"].shape[1] :].tolist()
    return [row + more for row, more in zip(ROWS, new, strict=True)], [*torch.stack(out.logits, dim=1).numpy()]


def in_one_pass(model: Any, rows: list[list[int]]) -> list[np.ndarray]:
    """Logits at all positions of rows that are padded on the left."""
    batch = left_padded(rows)
    with torch.no_grad():
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        logits = model(**batch, position_ids=positions, use_cache=False).logits.numpy()
    return [own[-len(row) :] for own, row in zip(logits, rows, strict=True)]


@jax.jit
def ours(model: lj.Llama, tokens: jax.Array, table: RopeTable) -> jax.Array:
    return output_logits(model, hidden_states(model, tokens, table))


def by_group(config: LlamaConfig, factors: lj.LayerFactors) -> RopeTable:
    """The table with a row for each KV group, so that all granularities of a model are one compiled program."""
    table = config.rope_table(max(LENGTHS) + NEW, jnp.asarray(factors.factors, jnp.float32), factors.granularity)
    groups = (config.num_layers, config.num_kv_heads, config.rotary_dim // 2)
    return RopeTable(jnp.broadcast_to(table.inv_freq, groups), table.attention_scaling)


def assert_parity(reference: Any, factors: lj.LayerFactors, model: lj.Llama, table: RopeTable) -> None:
    with lpes_torch.apply_layer_factors(reference, factors, length=max(LENGTHS) + NEW):
        rows, steps = in_torch(reference)
        whole = in_one_pass(reference, rows)
    tokens = jnp.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], jnp.int32)
    for row, step, all_of_it, wanted in zip(rows, steps, whole, np.asarray(ours(model, tokens, table)), strict=True):
        np.testing.assert_allclose(all_of_it, wanted[: len(row)], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(step, wanted[len(row) - NEW - 1 : len(row) - 1], rtol=0, atol=CLOSE)
        assert wanted[len(row) - NEW - 1 : len(row) - 1].argmax(-1).tolist() == row[-NEW:]


@pytest.mark.parametrize("family", mostly_long(FAMILIES, "llama-biases", "phi3-partial"))
def test_every_family_and_granularity(tmp_path, family):
    write_folder(tmp_path, hf_config(family, "default"))
    model, reference = load_llama(open_checkpoint(tmp_path), "float32"), torch_model(tmp_path)
    plain = in_one_pass(reference, ROWS)
    for granularity in GRANULARITIES:
        factors = factors_of(granularity)
        assert_parity(reference, factors, model, by_group(model.config, factors))
        with lpes_torch.apply_layer_factors(reference, factors):
            assert np.abs(in_one_pass(reference, ROWS)[0] - plain[0]).max() > 100 * CLOSE
        with lpes_torch.apply_layer_factors(reference, lj.LayerFactors(np.ones(SHAPES[granularity]), granularity)):
            np.testing.assert_equal(in_one_pass(reference, ROWS), plain)  # factors of 1: the model as it is, bit for bit
        np.testing.assert_equal(in_one_pass(reference, ROWS), plain)  # undone


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> lj.Llama:
    folder = write_folder(tmp_path_factory.mktemp("llama"), hf_config("llama", "default"))
    return load_llama(open_checkpoint(folder), "float32")


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_kind(tmp_path, rope, llama):
    """The weights are the same for all kinds. Twelve tokens and four more go beyond the windows of dynamic and longrope."""
    config, factors = hf_config("llama", rope), factors_of("layer_group_band")
    table = by_group(LlamaConfig.from_hf(config), factors)
    assert_parity(torch_model(write_folder(tmp_path, config)), factors, llama, table)


def test_as_transformers_does_it_where_no_length_is_given(tmp_path, llama):
    """`dynamic` then goes by the longest text so far: of one pass it is that text."""
    config, factors = hf_config("llama", "dynamic"), factors_of("layer_band")
    reference, rows = torch_model(write_folder(tmp_path, config)), [[*range(3, 19)], [*range(40, 47)]]
    with lpes_torch.apply_layer_factors(reference, factors):
        found = in_one_pass(reference, rows)
    tokens = jnp.array([rows[0], rows[1] + [0] * 9], jnp.int32)
    wanted = np.asarray(ours(llama, tokens, by_group(LlamaConfig.from_hf(config), factors)))
    for row, one, other in zip(rows, found, wanted, strict=True):
        np.testing.assert_allclose(one, other[: len(row)], rtol=0, atol=CLOSE)


def test_factors_may_come_in_many_ways_and_the_last_call_counts(tmp_path):
    write_folder(tmp_path, hf_config("llama", "default"))
    reference, factors = torch_model(tmp_path), factors_of("layer")
    factors.save(tmp_path / "factors.json")
    first = lpes_torch.apply_layer_factors(reference, factors_of("layer_group"))
    with lpes_torch.apply_layer_factors(reference, factors):
        wanted = in_one_pass(reference, ROWS)
    first.close()
    record = json.loads((tmp_path / "factors.json").read_text())
    for given in (str(tmp_path / "factors.json"), record, factors.factors.tolist(), torch.tensor(factors.factors)):
        with lpes_torch.apply_layer_factors(reference.model, given):
            np.testing.assert_equal(in_one_pass(reference, ROWS), wanted)


def test_what_torch_cannot_use_is_refused(tmp_path):
    assert lpes_torch.MODEL_TYPES == SUPPORTED_MODEL_TYPES
    reference = torch_model(write_folder(tmp_path, hf_config("llama", "default")))
    refused = {
        "3 layers of factors, but the model has 4": np.ones(3),
        "must be finite and above 0": [1, 1, 0, 1],
        "not of granularity 'layer'": np.ones((4, 2)),
        "3 KV groups of factors, but the model has 2": {"factors": np.ones((4, 3)), "granularity": "layer_group"},
        "3 bands of factors do not divide the model's 4 frequencies": lj.LayerFactors(np.ones((4, 3)), "layer_band"),
        "the model's config has no lpes_factors": None,
    }
    for words, factors in refused.items():
        with pytest.raises(ValueError, match=words):
            lpes_torch.apply_layer_factors(reference, factors)
    with pytest.raises(ValueError, match="no decoder with layers"):
        lpes_torch.apply_layer_factors(torch.nn.Linear(2, 2), [1.0])
    with lpes_torch.apply_layer_factors(reference.to(torch.bfloat16), [1.0] * 4):
        with pytest.raises(RuntimeError, match="inverse frequencies in torch.bfloat16: load with dtype="):
            in_one_pass(reference, ROWS)
    reference.config.model_type = "gemma"
    with pytest.raises(ValueError, match="'gemma' is not supported; supported: llama"):
        lpes_torch.apply_layer_factors(reference, [1.0] * 4)


TINY = lj.LayerFactors(np.random.default_rng(1).uniform(0.5, 2.0, (3, 2, 4)), "layer_group_band")  # for `model_folder`


@pytest.mark.long
def test_the_folder_needs_neither_jax_nor_lpes_jax(model_folder, tmp_path):
    TINY.save(tmp_path / "f.json")
    folder = run_export(
        ExportSettings.of(model=str(model_folder), factors=tmp_path / "f.json", output_path=tmp_path / "out", to="hf-hook")
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.json", "out"]  # nothing temporary is left
    assert (folder / "model.safetensors").resolve() == (model_folder / "model.safetensors").resolve()
    np.testing.assert_array_equal(lj.LayerFactors.load(folder / "factors.json").factors, TINY.factors)
    script = (
        "import runpy, sys\n"
        f"try: runpy.run_path({str(folder / 'lpes_torch.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(9 if {'jax', 'jaxlib', 'lpes_jax'} & sys.modules.keys() else code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same ids" in done.stdout and "a KV cache: equal" in done.stdout
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (1e4, None)  # transformers 4 reads these
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    config["lpes_factors"]["factors"][2][0][0] *= 1.2
    (folder / "config.json").write_text(json.dumps(config))
    assert not lpes_torch.self_test(folder)


def write_gguf(path: Path) -> None:
    """A qwen3 file with a vocabulary of bytes."""
    tokens = [*sorted(ByteLevel.alphabet()), "Ġa", "<s>", "</s>"]
    config = hf_config("qwen3", "default", vocab_size=len(tokens))
    keys = {
        "block_count": 4, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in keys.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    weights = weights_of(config)
    for name, other in TENSOR_NAMES.items():
        for layer in range(4 if "{}" in name else 1):
            if (weight := weights.get(name.format(layer))) is not None:
                writer.add_tensor(other.format(layer), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    factors_of("layer_band").save(tmp_path / "f.json")
    path = run_export(
        ExportSettings.of(
            model=str(tmp_path / "m.gguf"), factors=tmp_path / "f.json", output_path=tmp_path / "out", to="hf-hook"
        )
    )
    assert lpes_torch.self_test(path)
    source, folder = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(path)
    assert folder.config == source.config
    for name in source.names():
        np.testing.assert_array_equal(folder.read(name), source.read(name))
    one, other = load_tokenizer(tmp_path / "m.gguf"), load_tokenizer(path)
    assert one("Größe 12")["input_ids"] == other("Größe 12")["input_ids"]
    assert stop_ids(path, other) == stop_ids(tmp_path / "m.gguf", one) == [258]
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(path).generation_config.eos_token_id == [258]


def test_what_cannot_be_exported_leaves_nothing(model_folder, tmp_path):
    good, target = tmp_path / "f.json", tmp_path / "out"
    TINY.save(good)
    settings = ExportSettings.of(model=str(model_folder), factors=good, output_path=target, to="hf-hook", no_self_test=True)

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(lj.UserError, match=words) as refusal:
            run_export(settings.replace(**changes))
        assert "\n" not in str(refusal.value)

    refused("--factors: give", factors=None)
    lj.LayerFactors.uniform(1.5, 4).save(tmp_path / "four.json")
    refused("four.json: 4 layers of factors, but the model has 3", factors=tmp_path / "four.json")
    (tmp_path / "file").write_text("")
    refused("file is a file, not a folder", output_path=tmp_path / "file" / "out")
    damaged = tmp_path / "damaged"  # found when the weights are read, for the self-test: the other files are there by then
    damaged.mkdir()
    for file in model_folder.iterdir():
        os.link(file, damaged / file.name)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").unlink()
    (damaged / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    refused("the tensors do not fit the model", model=str(damaged), no_self_test=False)
    assert not target.exists() and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    target.mkdir()  # empty: of use
    run_export(settings.replace(copy=True))
    assert not (target / "model.safetensors").is_symlink() and not (target / "self_test.json").exists()
    assert (target / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()
    refused("out contains a finished run .* or --overwrite")
