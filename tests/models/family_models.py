"""Tiny models of every family and RoPE kind: the families' real configs shrunk, and weights from a seeded generator.

Norms are not 1 and biases not 0. `hf_config` and `weights_of` give what a Hugging Face folder holds, without torch.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
# The configs of Llama-2-7B, Llama-3.2-1B, a Llama with biases, Mistral-7B-v0.1, Qwen2.5-7B, its windowed like, Qwen3-0.6B,
# SmolLM3-3B, its windowed like, Phi-3-mini-4k and Phi-4-mini, with other sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 1e4},
    "llama-tied": {"model_type": "llama", "rope_theta": 5e5, "head_dim": 16, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "rope_theta": 1e4, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 5, "use_sliding_window": False},
    "qwen2-windows": {
        "model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "rope_theta": 5e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "smollm3-windows": {
        "model_type": "smollm3", "rope_theta": 5e6, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True,
        "sliding_window": 4,
    },
    "phi3": {"model_type": "phi3", "rope_theta": 1e4, "sliding_window": 9},
    "phi3-partial": {"model_type": "phi3", "rope_theta": 1e4, "hidden_size": 64, "partial_rotary_factor": 0.75},
}  # fmt: skip
SHORT, LONG = ([1 + rise * i for i in range(8)] for rise in (0.05, 0.4))
# RoPE kinds in v4 spelling; the windows are so small that twelve tokens are beyond them.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn-mscale": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.2,
            "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
        },
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "longrope": {
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        "original_max_position_embeddings": 8,
    },
    "longrope-short": {
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip

CASES = [
    (family, rope)
    for family in FAMILIES
    for rope in ROPES
    if "phi3" not in family or rope == "default" or rope.startswith("longrope")  # it has no other kinds
]


def hf_config(family: str, rope: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(SIZES | FAMILIES[family] | ROPES[rope] | changes)
    scaling = config.get("rope_scaling", {})
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name in scaling.keys() & {"short_factor", "long_factor"}:
        scaling[name] = scaling[name][: int(head_dim * config.get("partial_rotary_factor", 1.0)) // 2]
    return config


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A state dict as transformers names it."""
    kind, hidden, ff = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (ff, hidden), "up_proj": (ff, hidden), "down_proj": (hidden, ff)}
    if kind == "phi3":
        shapes = {"qkv_proj": (q + 2 * kv, hidden), "o_proj": (hidden, q)}
        mlp = {"gate_up_proj": (2 * ff, hidden), "down_proj": (hidden, ff)}
    biased = ("q_proj", "k_proj", "v_proj") if kind == "qwen2" else tuple(shapes) if config.get("attention_bias") else ()
    biased += tuple(mlp) if config.get("mlp_bias") else ()
    rng = np.random.RandomState(0)  # its stream is the same in every NumPy

    def normal(mean: float, deviation: float, *shape: int) -> np.ndarray:
        return (mean + deviation * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(0, 1, config["vocab_size"], hidden),
        "model.norm.weight": normal(1, 0.3, hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(0, 0.15, config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(1, 0.3, hidden)
        for block, parts in (("self_attn", shapes), ("mlp", mlp)):
            for name, shape in parts.items():
                tensors[f"model.layers.{layer}.{block}.{name}.weight"] = normal(0, 0.8 / shape[1] ** 0.5, *shape)
                if name in biased:
                    tensors[f"model.layers.{layer}.{block}.{name}.bias"] = normal(0, 0.3, shape[0])
        for name in ("q_norm", "k_norm") if kind == "qwen3" else ():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = normal(1, 0.3, head_dim)
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights_of(config) if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
