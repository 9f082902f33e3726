"""Translation of a GGUF model to Hugging Face: its config.json, and its tensors' Hugging Face names.

    gguf = GgufFile.open(Path("model.gguf"))
    config = LlamaConfig.from_hf(hf_config(gguf), str(gguf.path))
    names = hf_names(gguf)  # {"model.norm.weight": "output_norm.weight", ...}

Architectures are those that llama.cpp's converter writes for Llama, Mistral and their relatives (`llama`), Qwen2 and Qwen2.5
(`qwen2`), Qwen3 (`qwen3`) and Phi-3 (`phi3`, with query-key-value and gate-up matrices fused as in Hugging Face). A key that
changes the computation and has no Hugging Face counterpart is refused by name; `KEYS` lists how each key is treated.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt8

from lpes_jax.errors import UserError
from lpes_jax.mark import GGUF_KEY
from lpes_jax.mark import KEY as MARK_KEY
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.gguf import ALL, GgufFile

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")

# Hugging Face tensor name -> GGUF name; {} is the layer.
TENSOR_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
    "model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias",
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}
_FUSED_NAMES = {
    "model.layers.{}.self_attn.qkv_proj.weight": "blk.{}.attn_qkv.weight",
    "model.layers.{}.mlp.gate_up_proj.weight": "blk.{}.ffn_up.weight",
}

# How each key below the architecture's name (`llama.` and so on) is treated. _READ: as in llama.cpp. A string: ignored, with
# the reason why that changes nothing. A tuple: these values change nothing, any other is refused. A key that is not listed is
# refused too, unless it is 0, false or empty. Other keys: tokenizer.py reads `tokenizer.*`; gguf.py reads `split.*` and
# `general.alignment`; `general.architecture` and `general.type` are read here. The rest of `general.*`, and keys that tools
# write under their own names, do not affect the computation.
_READ = None
_LABEL, _OF_EXPERTS, _OF_WINDOWS = "a label", (0, 0.0, False), (0, False, ())
KEYS: dict[str, None | str | tuple[Any, ...]] = {
    "context_length": _READ, "embedding_length": _READ, "embedding_length_out": _READ, "block_count": _READ,
    "feed_forward_length": _READ, "attention.head_count": _READ, "attention.head_count_kv": _READ,
    "attention.key_length": _READ, "attention.value_length": _READ, "attention.layer_norm_rms_epsilon": _READ,
    "rope.dimension_count": _READ, "rope.freq_base": _READ,
    "rope.scaling.type": _READ,  # without a type, a factor is linear
    "rope.scaling.factor": _READ, "rope.scale_linear": _READ,  # the second is the older name of the first
    "rope.scaling.original_context_length": _READ,
    "rope.scaling.attn_factor": _READ,  # the multiplier of cos and sin (longrope and rope_freqs.weight; else only 1)
    "rope.scaling.yarn_ext_factor": _READ,  # only 1, or below 0, which means "not set"
    "rope.scaling.yarn_beta_fast": _READ, "rope.scaling.yarn_beta_slow": _READ,
    "attention.sliding_window": _OF_WINDOWS,  # read for phi3

    # llama.cpp reads it for other architectures only; here it computes the factor itself: 1 + 0.1 ln(factor). The converter
    # writes a config.json's `attn_factor` here, which transformers does not read either.
    "rope.scaling.yarn_attn_factor": "llama.cpp uses 1 + 0.1 ln(factor) for every value",
    "rope.scaling.finetuned": "it says how the model was trained",
    "vocab_size": "token_embd.weight has a row for each token", "tensor_data_layout": _LABEL, "pooling_type": "for embeddings",
    "attention.layer_norm_epsilon": "the norms are RMS norms", "classifier.output_labels": _LABEL,

    "attention.causal": (True,), "use_parallel_residual": (False,), "rope.dimension_sections": ((0, 0, 0, 0),),
    "swin_norm": (False,),
    "attention.scale": (0.0,), "attention.output_scale": (0.0, 1.0), "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0), "attention.clamp_kqv": (0.0,), "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,), "attention.temperature_length": (0,), "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,), "router_logit_softcapping": (0.0,), "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,), "attention.sliding_window_pattern": _OF_WINDOWS,
    "rope.freq_base_swa": (0.0,), "rope.dimension_count_swa": (0,), "attention.key_length_swa": (0,),
    "attention.value_length_swa": (0,), "attention.key_length_mla": (0,), "attention.value_length_mla": (0,),
    "attention.q_lora_rank": (0,), "attention.kv_lora_rank": (0,), "attention.shared_kv_layers": (0,),
    "nextn_predict_layers": (0,), "leading_dense_block_count": (0,), "full_attention_interval": (0,),
    "interleave_moe_layer_step": (0,), "moe_every_n_layers": (0,),
    "expert_count": _OF_EXPERTS, "expert_used_count": _OF_EXPERTS,
    "expert_shared_count": _OF_EXPERTS, "expert_group_count": _OF_EXPERTS, "expert_group_used_count": _OF_EXPERTS,
    "expert_feed_forward_length": _OF_EXPERTS, "expert_shared_feed_forward_length": _OF_EXPERTS,
    "expert_weights_scale": _OF_EXPERTS, "expert_weights_norm": _OF_EXPERTS, "expert_gating_func": _OF_EXPERTS,
}  # fmt: skip
_FOR_EACH_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")  # one number, or one per layer
# Tensors that are not weights: RoPE frequencies are divided by them, with one divisor per frequency.
_ROPE_DIVISORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """The config.json of the same model in Hugging Face layout. Raises UserError, naming the key, if there is none."""
    where, metadata = gguf.path, gguf.metadata
    architecture = _architecture(gguf)
    _check_keys(gguf, architecture)
    if "token_embd.weight" not in gguf.tensors:
        raise UserError(f"{where}: tensor token_embd.weight is missing; is this a whole model?")

    def number(key: str, kind: type = int, default: int | float | None = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise UserError(f"{where}: metadata key {architecture}.{key} is missing; convert the model again")
        if key in _FOR_EACH_LAYER and isinstance(value, list) and len(value) == metadata.get(f"{architecture}.block_count"):
            value = value[0] if value.count(value[0]) == len(value) else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(value, (int, kind)):
            raise UserError(f"{where}: {architecture}.{key} must be one number for all layers, got {value!r:.60}")
        if kind is int:
            return value
        if not abs(value) < 2**127:
            raise UserError(f"{where}: {architecture}.{key} must be a finite number, got {value!r}")
        # GGUF floats are float32: 1e-05 of a config.json is stored as 9.999999747378752e-06.
        return float(str(np.float32(value)))

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", default=hidden // heads if heads > 0 else 0)
    if number("attention.value_length", default=head_dim) != head_dim:
        raise UserError(
            f"{where}: {architecture}.attention.value_length={number('attention.value_length')} is not supported "
            f"(only the head size, {head_dim})"
        )
    if number("embedding_length_out", default=hidden) != hidden:
        raise UserError(f"{where}: {architecture}.embedding_length_out is not supported (only embedding_length, {hidden})")
    config = {
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": number("context_length", default=2048),
        "rope_parameters": _rope(gguf, number, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    if GGUF_KEY in metadata:
        config[MARK_KEY] = metadata[GGUF_KEY]
    if architecture == "phi3":
        config["sliding_window"] = number("attention.sliding_window", default=0) or None
    if architecture == "llama":  # two flags in config.json; a GGUF file has or lacks the biases
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    return config


def llama_config(gguf: GgufFile) -> LlamaConfig:
    """The config that the metadata describe. Raises UserError, naming the key, for what the port does not support."""
    return LlamaConfig.from_hf(hf_config(gguf), str(gguf.path))


def hf_names(gguf: GgufFile) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every weight in the file. A weight without a Hugging Face name keeps its own."""
    names = TENSOR_NAMES | (_FUSED_NAMES if _architecture(gguf) == "phi3" else {})
    to_hf = {gguf_name: hf for hf, gguf_name in names.items()}
    found = {}
    for name in gguf.tensors:
        layer = re.match(r"blk\.(\d+)\.", name)
        pattern = name if layer is None else f"blk.{{}}.{name[layer.end() :]}"
        hf = to_hf[pattern].format(layer and layer[1]) if pattern in to_hf else name
        if name not in _ROPE_DIVISORS:
            found[hf] = name
    return found


def read_hf(
    gguf: GgufFile, hf_name: str, gguf_name: str, config: LlamaConfig, rows: slice = ALL
) -> Float[np.ndarray, "*shape"]:
    """Read a weight, or some of its rows, in Hugging Face's layout and float32.

    Only `llama` files store query and key rows in another order.
    """
    heads = _permuted_heads(gguf, hf_name, config)
    return gguf.read(gguf_name, rows) if heads is None else unpermute(gguf.read(gguf_name), heads)[rows]


def read_hf_packed(
    gguf: GgufFile, hf_name: str, gguf_name: str, config: LlamaConfig, rows: slice = ALL
) -> UInt8[np.ndarray, "rows bytes"]:
    """Like `read_hf`, but the bytes of the rows as they are in the file."""
    heads = _permuted_heads(gguf, hf_name, config)
    return gguf.read_packed(gguf_name, rows) if heads is None else unpermute(gguf.read_packed(gguf_name), heads)[rows]


def _permuted_heads(gguf: GgufFile, hf_name: str, config: LlamaConfig) -> int | None:
    """The number of heads whose rows the file has in Meta's order; None: the order is Hugging Face's."""
    if gguf.metadata["general.architecture"] != "llama":
        return None
    return config.num_heads if ".q_proj." in hf_name else config.num_kv_heads if ".k_proj." in hf_name else None


def unpermute(weights: Shaped[np.ndarray, "rows *E"], num_heads: int) -> Shaped[np.ndarray, "rows *E"]:
    """Reorder query or key rows (or their biases) from GGUF's interleaved order (Meta's) to Hugging Face's half-split order.

    This undoes llama.cpp's `permute`. `num_heads` is H for queries and K for keys. The 8 rows of a head are reordered to
    0 2 4 6 1 3 5 7.
    """
    rows, *width = weights.shape
    return weights.reshape(num_heads, rows // num_heads // 2, 2, *width).swapaxes(1, 2).reshape(rows, *width)


def permute(weights: Float[np.ndarray, "rows *E"], num_heads: int) -> Float[np.ndarray, "rows *E"]:
    """llama.cpp's `permute`, the inverse of `unpermute`: elements that rotate together become adjacent."""
    rows, *width = weights.shape
    return weights.reshape(num_heads, 2, rows // num_heads // 2, *width).swapaxes(1, 2).reshape(rows, *width)


def _check_keys(gguf: GgufFile, architecture: str) -> None:
    """Raise UserError for a key that changes the computation and is not implemented (see `KEYS`)."""
    for name, value in gguf.metadata.items():
        if not name.startswith(f"{architecture}."):
            continue
        key = name.removeprefix(f"{architecture}.")
        fate = _READ if (architecture, key) == ("phi3", "attention.sliding_window") else KEYS.get(key, ())
        if fate is _READ or isinstance(fate, str):
            continue
        plain: Any = tuple(value) if isinstance(value, list) else value
        if plain in (fate or ()) or (key not in KEYS and not (any(plain) if isinstance(plain, tuple) else plain)):
            continue
        if key in KEYS:
            raise UserError(f"{gguf.path}: {name}={value!r:.60} is not supported (only {next(iter(fate or ()), None)!r})")
        raise UserError(
            f"{gguf.path}: {name}={value!r:.60} is unknown and may change the computation; if it does not, remove it "
            f"(gguf-new-metadata --remove-metadata {name} IN OUT)"
        )


def _architecture(gguf: GgufFile) -> str:
    if (kind := gguf.metadata.get("general.type", "model")) != "model":
        raise UserError(f"{gguf.path}: general.type is {kind!r:.60}; give the .gguf file of the model itself")
    architecture = gguf.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UserError(
            f"{gguf.path}: general.architecture {architecture!r:.60} is not supported; supported model types: {supported}"
        )
    return architecture


def _rope(gguf: GgufFile, number: Callable[..., Any], head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of transformers v5."""
    where, architecture = gguf.path, _architecture(gguf)
    if f"{architecture}.rope.freq_base" not in gguf.metadata:
        warnings.warn(f"{where}: no {architecture}.rope.freq_base; using 10000, the GGUF default", stacklevel=3)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number("rope.freq_base", float, 10000.0)}
    rotated = number("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        # The rows of `llama` files are ordered for a whole head: rotating a part of it would pair other rows.
        if architecture == "llama" or not 0 < rotated < head_dim or rotated % 2:
            raise UserError(
                f"{where}: {architecture}.rope.dimension_count={rotated} is not supported (only the head size, {head_dim})"
            )
        rope["partial_rotary_factor"] = rotated / head_dim

    kind = gguf.metadata.get(f"{architecture}.rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise UserError(
            f"{where}: {architecture}.rope.scaling.type {kind!r:.60} is not supported; supported: none, linear, yarn, longrope"
        )
    context = number("context_length", default=2048)
    original = number("rope.scaling.original_context_length", default=context)
    factor_key = "rope.scaling.factor"
    if f"{architecture}.{factor_key}" not in gguf.metadata:
        factor_key = "rope.scale_linear"
    factor = 0.0 if kind == "none" else number(factor_key, float, 0.0)
    if factor < 0:
        raise UserError(f"{where}: {architecture}.{factor_key} must be above 0, got {factor}")
    attention_factor = number("rope.scaling.attn_factor", float, 1.0)
    if divisors := [name for name in _ROPE_DIVISORS if name in gguf.tensors]:
        if kind not in (None, "none", "longrope"):
            raise UserError(f"{where}: tensor {divisors[0]} together with rope.scaling.type {kind!r} is not supported")
        if factor not in (0.0, 1.0):
            raise UserError(f"{where}: tensor {divisors[0]} together with {factor_key} {factor} is not supported")
        if "rope_freqs.weight" in divisors:
            # Llama 3's rule, already evaluated by the converter: a longrope with two equal lists.
            short = long = _divisors(gguf, "rope_freqs.weight", rotated)
            return rope | _longrope(short, long, context, attention_factor)
        for name in _ROPE_DIVISORS[1:]:
            if name not in divisors:
                raise UserError(f"{where}: tensor {name} is missing beside {divisors[0]}; convert the model again")
        short, long = (_divisors(gguf, f"rope_factors_{length}.weight", rotated) for length in ("short", "long"))
        return rope | _longrope(short, long, original, attention_factor)
    if kind == "longrope":
        raise UserError(f"{where}: tensor rope_factors_long.weight is missing; convert the model again")
    if attention_factor != 1:
        raise UserError(f"{where}: {architecture}.rope.scaling.attn_factor={attention_factor} is not supported (only 1.0)")
    if factor in (0.0, 1.0):
        return rope
    rope |= {"rope_type": kind or "linear", "factor": factor}
    if kind == "yarn":
        extrapolation = number("rope.scaling.yarn_ext_factor", float, 1.0)
        if extrapolation != 1 and extrapolation >= 0:  # negative means "not set"
            key = f"{architecture}.rope.scaling.yarn_ext_factor"
            raise UserError(f"{where}: {key}={extrapolation} is not supported (only 1.0)")
        rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if f"{architecture}.rope.scaling.yarn_{name}" in gguf.metadata:
                rope[name] = number(f"rope.scaling.yarn_{name}", float)
    return rope


def _longrope(short: list[float], long: list[float], original: int, attention_factor: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }  # fmt: skip


def _divisors(gguf: GgufFile, name: str, rotated: int) -> list[float]:
    shape = gguf.tensors[name].shape
    if shape != (rotated // 2,):
        raise UserError(f"{gguf.path}: tensor {name} is {list(shape)}, wanted [{rotated // 2}], one divisor per RoPE frequency")
    divisors = gguf.read(name)
    if not np.all(np.isfinite(divisors) & (divisors > 0)):
        raise UserError(f"{gguf.path}: tensor {name} holds a divisor that is not above 0; fetch the file again")
    return divisors.tolist()
