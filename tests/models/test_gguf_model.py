"""Architectures in GGUF files: their Hugging Face config and names, and the same logits as from a folder."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from lpes_jax.api import logits
from lpes_jax.errors import UserError
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.gguf_model import TENSOR_NAMES, hf_config, hf_names, unpermute
from lpes_jax.rope import RopeParameters, inverse_frequencies

EMBEDDING = np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)
KEYS = {
    "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5,
}  # fmt: skip


def write(path: Path, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None, **metadata) -> GgufFile:
    """A GGUF file of a small model, opened; `metadata` (without the architecture, `__` for dots) replaces its keys."""
    keys = KEYS | {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is None:
            continue
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    for name, array in ({"token_embd.weight": EMBEDDING} | (tensors or {})).items():
        if array is not None:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_config_from_the_metadata(tmp_path, architecture):
    config = hf_config(write(tmp_path / "m.gguf", architecture))
    assert config["model_type"] == architecture
    sizes = {
        "vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    assert {key: config[key] for key in sizes} == sizes
    assert config["rms_norm_eps"] == 1e-5  # not its float32 neighbour 9.999999747378752e-06
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    head = {"output.weight": EMBEDDING}
    config = hf_config(write(tmp_path / "m.gguf", architecture, head, attention__key_length=16, attention__head_count_kv=None))
    assert (config["head_dim"], config["num_key_value_heads"], config["tie_word_embeddings"]) == (16, 4, False)


def test_biases_are_there_or_not(tmp_path):
    config = hf_config(write(tmp_path / "m.gguf"))
    assert (config["attention_bias"], config["mlp_bias"]) == (False, False)
    biases = {"blk.0.attn_q.bias": EMBEDDING[0]}
    assert hf_config(write(tmp_path / "m.gguf", tensors=biases))["attention_bias"] is True


def test_the_window_of_phi3(tmp_path):
    assert hf_config(write(tmp_path / "m.gguf", "phi3", attention__sliding_window=2047))["sliding_window"] == 2047
    assert hf_config(write(tmp_path / "m.gguf", "phi3", attention__sliding_window=0))["sliding_window"] is None


@pytest.mark.parametrize("keys", [{"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}])
def test_linear_rope(tmp_path, keys):
    rope = hf_config(write(tmp_path / "m.gguf", **keys))["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}


def test_yarn(tmp_path):
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
    rope = hf_config(write(tmp_path / "m.gguf", "qwen2", **keys))["rope_parameters"]
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
    assert rope == yarn
    keys |= {"rope__scaling__yarn_beta_slow": 2.0, "rope__scaling__yarn_beta_fast": 24.0}
    rope = hf_config(write(tmp_path / "m.gguf", "qwen2", **keys))["rope_parameters"]
    assert rope == yarn | {"beta_fast": 24.0, "beta_slow": 2.0}


def test_longrope_of_phi3(tmp_path):
    factors = {"rope_factors_long.weight": np.array([1, 2, 8], np.float32), "rope_factors_short.weight": np.ones(3, np.float32)}
    keys = {
        "rope__dimension_count": 6, "rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": 1.25,
        "context_length": 128,
    }  # fmt: skip
    file = write(tmp_path / "m.gguf", "phi3", factors, **keys)
    assert hf_config(file)["rope_parameters"] == {
        "rope_type": "longrope", "rope_theta": 5e5, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.0, 1.0],
        "long_factor": [1.0, 2.0, 8.0], "original_max_position_embeddings": 32, "attention_factor": 1.25,
    }  # fmt: skip
    assert "rope_factors_long.weight" not in hf_names(file).values()  # used up


def test_rope_freqs_divide_the_frequencies(tmp_path):
    """Llama 3.1's file: one divisor a frequency, which is a longrope with one list for all lengths."""
    divisors = np.array([1, 1, 2.5, 8], np.float32)
    file = write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors})
    rope = hf_config(file)["rope_parameters"]
    assert rope["short_factor"] == rope["long_factor"] == [1.0, 1.0, 2.5, 8.0]
    assert (rope["rope_type"], rope["attention_factor"]) == ("longrope", 1.0)
    assert "rope_freqs.weight" not in hf_names(file).values()


def test_a_missing_rope_base_is_told(tmp_path):
    file = write(tmp_path / "m.gguf", rope__freq_base=None)
    with pytest.warns(UserWarning, match="llama.rope.freq_base"):
        assert hf_config(file)["rope_parameters"]["rope_theta"] == 10000.0


ROPE = np.ones(4, np.float32)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"rope__scaling__type": "longrope"}, "rope_factors_long.weight is missing"),
        ({"rope__scaling__type": "su"}, "rope.scaling.type 'su'.*supported: none, linear, yarn, longrope"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": -1.0}, "llama.rope.scaling.factor"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_ext_factor": 0.5},
            "yarn_ext_factor",
        ),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__attn_factor": 0.5}, "attn_factor=0.5"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "tensors": {"rope_freqs.weight": ROPE}},
            "together with",
        ),
        ({"tensors": {"rope_freqs.weight": ROPE[:3]}}, r"rope_freqs.weight is \[3\], wanted \[4\]"),
        ({"tensors": {"rope_freqs.weight": 0 * ROPE}}, "rope_freqs.weight holds a divisor"),
        ({"tensors": {"rope_factors_long.weight": ROPE}}, "rope_factors_short.weight is missing"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count=4"),
        ({"architecture": "qwen2", "rope__dimension_count": 10}, "qwen2.rope.dimension_count=10"),
        ({"attention__value_length": 4}, "llama.attention.value_length=4"),
        ({"expert_count": 8}, "llama.expert_count=8"),
        ({"architecture": "qwen2", "attention__sliding_window": 4096}, "qwen2.attention.sliding_window"),
        ({"attention__head_count_kv": [2, 4]}, "llama.attention.head_count_kv"),
        ({"block_count": None}, "llama.block_count"),
        ({"attention__head_count": "four"}, "llama.attention.head_count"),
        ({"rope__freq_base": math.inf}, "llama.rope.freq_base must be a finite number"),
        ({"architecture": "qwen2moe"}, "'qwen2moe'.*supported model types: llama, qwen2, qwen3, phi3"),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight"),
    ],
)
def test_models_that_are_not_implemented_are_refused_by_name(tmp_path, changes, named):
    with pytest.raises(UserError, match=named) as error:
        hf_config(write(tmp_path / "m.gguf", **changes))
    assert "m.gguf: " in str(error.value) and "\n" not in str(error.value)


def test_query_rows_go_from_metas_order_to_hugging_faces():
    rows = np.repeat(np.arange(16, dtype=np.float32)[:, None], 3, axis=1)
    assert unpermute(rows[:8], 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert unpermute(rows[:8, 0], 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]  # biases


def test_names_that_hugging_face_does_not_have_stay(tmp_path):
    odd = {"blk.0.attn_sinks.weight": ROPE, "blk.x.attn_q.weight": ROPE, "blk.12.ffn_up.weight": EMBEDDING}
    names = hf_names(write(tmp_path / "m.gguf", tensors=odd))
    assert set(names) == {
        "model.embed_tokens.weight", "blk.0.attn_sinks.weight", "blk.x.attn_q.weight", "model.layers.12.mlp.up_proj.weight",
    }  # fmt: skip
    names = hf_names(write(tmp_path / "m.gguf", "phi3", odd | {"blk.3.attn_qkv.weight": EMBEDDING}))
    assert names["model.layers.12.mlp.gate_up_proj.weight"] == "blk.12.ffn_up.weight"
    assert names["model.layers.3.self_attn.qkv_proj.weight"] == "blk.3.attn_qkv.weight"


def hugging_face_weights(architecture: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names: norms that are not 1, biases that are not 0."""
    rng = np.random.default_rng(1)
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"self_attn.o_proj.weight": (hidden, queries), "mlp.down_proj.weight": (hidden, mlp)}
    if architecture == "phi3":
        shapes |= {"self_attn.qkv_proj.weight": (queries + 2 * keys, hidden), "mlp.gate_up_proj.weight": (2 * mlp, hidden)}
    else:
        shapes |= {f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in (("q", queries), ("k", keys), ("v", keys))}
        shapes |= {f"mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
    if architecture == "qwen2":
        shapes |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", queries), ("k", keys), ("v", keys))}
    if architecture == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    weights = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": rng.uniform(0.5, 1.5, hidden)}
    weights["lm_head.weight"] = rng.standard_normal(EMBEDDING.shape)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            weight = rng.uniform(0.5, 1.5, shape) if "norm" in name else rng.standard_normal(shape) / 3
            weights[f"model.layers.{layer}.{name}"] = weight
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


def write_shards(folder: Path, weights: dict[str, np.ndarray]) -> None:
    names = sorted(weights)
    parts = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_folder_shards_and_gguf_give_the_same_logits(tmp_path, architecture):
    """Only the query and key rows of `llama` files are permuted, keys by their own number of heads."""
    metadata = {"attention__key_length": 16} if architecture == "qwen3" else {}
    config = hf_config(write(tmp_path / "header.gguf", architecture, {"output.weight": EMBEDDING}, **metadata))
    weights = hugging_face_weights(architecture, config)
    (tmp_path / "one").mkdir()
    (tmp_path / "shards").mkdir()
    save_file(weights, tmp_path / "one" / "model.safetensors")
    write_shards(tmp_path / "shards", weights)
    for folder in ("one", "shards"):
        (tmp_path / folder / "config.json").write_text(json.dumps(config))

    def permuted(name: str, weight: np.ndarray) -> np.ndarray:  # as the converter does it
        if architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
            return weight
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    tensors = {}
    for name, gguf_name in TENSOR_NAMES.items():
        for layer in range(2):
            if (weight := weights.get(name.format(layer))) is not None:
                tensors[gguf_name.format(layer)] = permuted(name, weight)
    if architecture == "phi3":
        for layer in range(2):
            tensors[f"blk.{layer}.attn_qkv.weight"] = weights[f"model.layers.{layer}.self_attn.qkv_proj.weight"]
            tensors[f"blk.{layer}.ffn_up.weight"] = weights[f"model.layers.{layer}.mlp.gate_up_proj.weight"]
    write(tmp_path / "model.gguf", architecture, tensors, **metadata)

    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (2, 11)))
    one, *others = (
        np.asarray(logits(load_llama(open_checkpoint(tmp_path / path), "float32"), tokens))
        for path in ("one", "shards", "model.gguf")
    )
    assert np.ptp(one) > 1
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_the_rope_of_llama_3_in_a_file_is_that_of_its_config(tmp_path):
    """The divisors are those of the converter's rule, for a head of 128 (FAULTS: theta 5e5, factor 8, 1, 4, 8192)."""
    llama3 = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    divisors = []
    for frequency in 5e5 ** (-np.arange(0, 128, 2) / 128):
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / 8 + smooth)
        divisors.append(1 if wavelength < 8192 / 4 else 8 if wavelength > 8192 else between)
    tensors = {"rope_freqs.weight": np.array(divisors, np.float32)}
    from_file = hf_config(write(tmp_path / "m.gguf", tensors=tensors, attention__key_length=128, context_length=131072))
    from_file = inverse_frequencies(RopeParameters.from_hf(from_file), 128)
    from_config = inverse_frequencies(RopeParameters.from_hf({"rope_parameters": llama3}), 128)
    np.testing.assert_allclose(from_file, from_config, rtol=3e-7)
    np.testing.assert_allclose(
        from_file[jnp.array([28, 29, 34, 35])], [3.21144599e-3, 2.16657076e-3, 1.78507813e-4, 9.55621235e-5], rtol=3e-7
    )
