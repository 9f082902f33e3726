"""The keys of each family's config.json that `LlamaConfig.from_hf` reads, and those that it refuses by name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from family_models import CASES, SIZES, hf_config

from lpes_jax.cli import main
from lpes_jax.errors import UserError
from lpes_jax.models.llama.config import SUPPORTED_MODEL_TYPES, LlamaConfig


def config_of(model_type: str, **changes: Any) -> LlamaConfig:
    config = SIZES | {"model_type": model_type, "rope_theta": 1e4} | changes
    return LlamaConfig.from_hf({key: value for key, value in config.items() if value != "absent"})


@pytest.mark.parametrize("family, rope", CASES)
def test_written_and_read_again_is_the_same(family, rope):
    config = LlamaConfig.from_hf(hf_config(family, rope))
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(replace(config))  # it is a static argument of compiled programs


@pytest.mark.parametrize(
    "model_type, changes, window, layers",
    [
        ("mistral", {"sliding_window": 4}, 4, [0, 1, 2, 3]),
        ("mistral", {"sliding_window": None}, None, []),
        ("mistral", {}, 4096, [0, 1, 2, 3]),  # transformers' default
        ("phi3", {"sliding_window": 2047}, 2047, [0, 1, 2, 3]),
        ("phi3", {}, None, []),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, None, []),
        ("qwen2", {"sliding_window": 4}, None, []),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, 4, [1, 2, 3]),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 4}, None, []),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True}, None, []),  # from layer 28 on
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 4096, [0, 1, 2, 3]),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            8,
            [0, 2],
        ),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}, None, []),
        ("smollm3", {"sliding_window": 4, "use_sliding_window": True, "no_rope_layer_interval": 2}, 4, [1, 3]),
        ("smollm3", {"sliding_window": 4, "use_sliding_window": False}, None, []),
    ],
)
def test_windows(model_type, changes, window, layers):
    config = config_of(model_type, **changes)
    assert (config.sliding_window, list(config.sliding_layers)) == (window, layers)
    assert config.windows(3).tolist() == [3] * 4
    wanted = [min(5000, window) if window and layer in layers else 5000 for layer in range(4)]
    assert config.windows(5000).tolist() == wanted


@pytest.mark.parametrize(
    "changes, layers",
    [
        ({}, [3]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, [1, 3]),
        ({"no_rope_layer_interval": 1}, [0, 1, 2, 3]),
        ({"no_rope_layers": [1, 1, 0, 1]}, [2]),
        ({"no_rope_layers": [1, 1, 1, 1, 0, 0]}, []),  # longer than the model, which transformers allows
        ({"no_rope_layers": [1, 0, 1, 1], "no_rope_layer_interval": 2}, [1]),
    ],
)
def test_layers_without_rope(changes, layers):
    config = config_of("smollm3", **changes)
    assert list(config.nope_layers) == layers
    turned = config.rope_table(12).inv_freq
    assert [layer for layer in range(4) if not turned[layer].any()] == layers


def test_what_a_config_leaves_out():
    """Key-value heads as many as heads; a head as wide as the embedding allows; the family's own defaults."""
    config = config_of("llama", num_key_value_heads="absent", head_dim="absent")
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config_of("llama", num_key_value_heads=None, head_dim=None).head_dim == 8
    assert config_of("qwen3").head_dim == 128
    assert config_of("llama", head_dim=16, hidden_size=20).head_dim == 16
    assert config_of("smollm3", tie_word_embeddings="absent").tie_word_embeddings
    assert not config_of("qwen2", tie_word_embeddings="absent").tie_word_embeddings


def test_qwen2_has_its_three_biases_whatever_the_config_says():
    for changes in ({}, {"attention_bias": False}, {"attention_bias": True}, {"attention_bias": None}):
        config = config_of("qwen2", **changes)
        assert config.qkv_bias and not config.attention_bias and not config.mlp_bias
    assert not config_of("llama").qkv_bias
    assert config_of("llama", attention_bias=True).qkv_bias


def test_theta_of_llama_1_and_2_is_taken_loudly():
    """Their files are older than the key; a Llama 3 without it would be broken silently."""
    with pytest.warns(UserWarning, match="config.json: no rope_theta; using 10000"):
        assert config_of("llama", rope_theta="absent").rope.rope_theta == 10_000
    for model_type in SUPPORTED_MODEL_TYPES[1:]:
        with pytest.raises(UserError, match="no rope_theta"):
            config_of(model_type, rope_theta="absent")
    with pytest.raises(UserError, match="no rope_theta"):
        config_of("llama", rope_theta="absent", rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize("model_type", ["gemma2", "mixtral", "deepseek_v3", "qwen2_moe", "gpt_neox", None, ["llama"]])
def test_other_architectures_are_refused_with_the_list(model_type):
    with pytest.raises(
        UserError, match="config.json: model_type .* not supported; .*: llama, mistral, qwen2, qwen3, smollm3, phi3$"
    ):
        config_of(model_type)


def test_another_architecture_is_exit_code_two(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "mixtral", "num_local_experts": 8}))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    assert main(["evaluate", "--model", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "'mixtral'" in message and "smollm3" in message


SLIDING = {"layer_types": ["sliding_attention"] * 4}


@pytest.mark.parametrize(
    "model_type, changes, words",
    [
        ("llama", {"rope_interleaved": True}, ["rope_interleaved=True"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ("llama", {"sliding_window": 4096}, ["sliding_window=4096", "llama"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ("llama", {"no_rope_layers": [1, 1, 1, 0]}, ["no_rope_layers"]),
        ("llama", {"logits_scaling": 8.0}, ["logits_scaling=8.0"]),
        ("llama", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts=8"]),
        ("llama", SLIDING, ["layer_types"]),
        ("mistral", {"attention_bias": True}, ["attention_bias=True"]),
        ("mistral", {"use_sliding_window": False}, ["sliding_window=4096", "use_sliding_window=False"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
        ("mistral", {"sliding_window": True}, ["sliding_window", "True"]),
        ("qwen2", {"mlp_bias": True}, ["mlp_bias=True"]),
        ("qwen2", {"use_mrope": True}, ["use_mrope=True"]),
        ("qwen2", SLIDING, ["layer_types", "use_sliding_window"]),
        ("qwen2", SLIDING | {"use_sliding_window": True, "sliding_window": None}, ["layer_types"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "4 layers"]),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, ["'chunked_attention'", "sliding_attention"]),
        ("qwen2", {"use_sliding_window": "yes"}, ["use_sliding_window", "'yes'"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, ["max_window_layers", "None"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "4 layers"]),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, ["no_rope_layers"]),
        ("smollm3", {"no_rope_layer_interval": 0}, ["no_rope_layer_interval", "0"]),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear'", "default, longrope"]),
        ("phi3", {"partial_rotary_factor": 0.4}, ["head_dim", "3 are rotated"]),
        ("phi3", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        (
            "phi3",
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3},
                "original_max_position_embeddings": 64,
            },
            ["long_factor has 3", "4 frequencies"],
        ),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 4, "hidden_size": 48}, ["6 heads", "4 key-value heads"]),
        ("llama", {"num_attention_heads": 5}, ["32", "5 heads"]),
        ("llama", {"num_attention_heads": 4.0}, ["num_attention_heads", "4.0"]),
        ("llama", {"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
        ("llama", {"head_dim": 7}, ["head_dim", "7"]),
        ("llama", {"head_dim": 0}, ["head_dim", "0"]),
        ("llama", {"vocab_size": True}, ["vocab_size", "True"]),
        ("llama", {"vocab_size": 10**400}, ["vocab_size"]),
        ("llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers", "1,000,000,000"]),
        ("llama", {"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ("llama", {"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
        ("llama", {"tie_word_embeddings": "false"}, ["tie_word_embeddings", "'false'"]),
        ("llama", {"max_position_embeddings": "4k"}, ["max_position_embeddings", "'4k'"]),
        ("llama", {"hidden_size": None, "vocab_size": None}, ["vocab_size, hidden_size missing"]),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(model_type, changes, words):
    with pytest.raises(UserError) as refusal:
        config_of(model_type, **changes)
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 300
    assert all(word in message for word in words), message
