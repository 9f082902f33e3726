"""The config of a Llama-family checkpoint, and the checks of what this port supports.

A checkpoint is understood completely or refused: a key that changes the computation and that the port does not implement raises
a `UserError` that names it. The reference is transformers' modeling files (version 5), for each family.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import KEY as MARK_KEY
from lpes_jax.mark import Mark
from lpes_jax.rope import Granularity, RopeParameters, RopeTable, rope_table

# Each family: its class in transformers, and that class's defaults for keys that a config lacks.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"max_position_embeddings": 2048}),
    "mistral": ("MistralForCausalLM", {"max_position_embeddings": 131_072, "sliding_window": 4096}),
    "qwen2": ("Qwen2ForCausalLM", {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {"max_position_embeddings": 32_768, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3ForCausalLM", {"max_position_embeddings": 4096}),
}
SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)
_WITH_LAYER_TYPES = ("qwen2", "qwen3", "smollm3")
_MOST_LAYERS = 2**14

# Keys of a Hugging Face config that change the computation, the value that this port implements, and the families for which
# every value is implemented (or has no effect, like `attention_bias` in Qwen2, which always has three biases).
_IMPLEMENTED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "hidden_act": ("silu", ()),
    "attention_bias": (False, ("llama", "qwen2", "qwen3", "smollm3")),
    "mlp_bias": (False, ("llama", "smollm3")),
    "sliding_window": (None, ("mistral", "qwen2", "qwen3", "smollm3", "phi3")),
    "use_sliding_window": (False, _WITH_LAYER_TYPES),
    "layer_types": (None, _WITH_LAYER_TYPES),
    "no_rope_layers": (None, ("smollm3",)),
    "no_rope_layer_interval": (None, ("smollm3",)),
    "rope_interleaved": (False, ()),
    "use_mrope": (False, ()),
    "lm_head_bias": (False, ()),
    "use_qk_norm": (False, ()),
    "clip_qkv": (None, ()),
    "query_pre_attn_scalar": (None, ()),
    "attn_logit_softcapping": (None, ()),
    "final_logit_softcapping": (None, ()),
    "attention_multiplier": (None, ()),
    "attention_chunk_size": (None, ()),
    "embedding_multiplier": (1.0, ()),
    "residual_multiplier": (1.0, ()),
    "logits_scaling": (1.0, ()),
    "logit_scale": (1.0, ()),
    "num_experts": (0, ()),
    "num_local_experts": (0, ()),
    "n_routed_experts": (0, ()),
    "kv_lora_rank": (None, ()),
    "per_layer_config": (None, ()),
    "quantization_config": (None, ()),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-architecture decoder; the names are mostly those of Hugging Face's `LlamaConfig`."""

    vocab_size: int
    hidden_size: int  # E
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    tie_word_embeddings: bool = False
    model_type: str = "llama"
    attention_bias: bool = False  # on the queries, keys, values and the output of the attention
    mlp_bias: bool = False
    sliding_window: int | None = None  # how many keys a query of the layers below sees, including its own
    sliding_layers: tuple[int, ...] = ()
    nope_layers: tuple[int, ...] = ()  # layers without RoPE
    mark: Mark | None = field(default=None, repr=False)  # factors that the files already hold; records hash the repr

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < 2**31:
                raise UserError(f"model config: {name} must be a positive whole number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model config: {self.num_heads} heads cannot be divided into {self.num_kv_heads} key-value heads")
        if self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim < (4 if self.rope.rope_type == "dynamic" else 2):
            part = "" if self.rotary_dim == self.head_dim else f", of which {self.rotary_dim} are rotated"
            raise UserError(f"model config: head_dim must be even for RoPE, got {self.head_dim}{part}")
        if self.rope.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.rope, name))) != self.rotary_dim // 2:
                    raise UserError(
                        f"model config: {name} has {count} numbers, but a head has {self.rotary_dim // 2} frequencies"
                    )

    @property
    def rotary_dim(self) -> int:
        """R: the number of elements of a head that RoPE rotates."""
        return self.rope.rotary_dim(self.head_dim)

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised, per head, before they are rotated."""
        return self.model_type == "qwen3"

    @property
    def fused(self) -> bool:
        """Whether checkpoints hold queries, keys and values as one tensor, and gate and up as another."""
        return self.model_type == "phi3"

    def windows(self, length: int) -> Int[np.ndarray, "L"]:
        """The number of keys, counted back from its own, that a query of each layer sees in a text of `length` tokens."""
        windows = np.full(self.num_layers, length, np.int32)
        windows[list(self.sliding_layers)] = min(length, self.sliding_window or length)
        return windows

    def rope_table(
        self,
        length: int,
        factors: LayerFactors | Float[Array, "..."] | None = None,
        granularity: Granularity = "layer",
        gains: Float[Array, "..."] | None = None,
        gains_granularity: Granularity = "layer",
    ) -> RopeTable:
        """The RoPE of every layer, divided by `factors` and with `gains` (see `lpes_jax.rope`).

        Args:
            length: Tokens of the longest text of the call, prompt and answer together; used by `dynamic` and `longrope`.
            factors: An array, or LayerFactors with their own gains and granularities; None means the model's own RoPE.
            granularity: Granularity of an array of factors.
            gains: Gains, if `factors` is an array.
            gains_granularity: Their granularity.
        """
        if isinstance(factors, LayerFactors):
            found, granularity, gains_granularity = factors, factors.granularity, factors.gains_granularity or "layer"
            factors = jnp.asarray(found.factors, jnp.float32)
            gains = None if found.gains is None else jnp.asarray(found.gains, jnp.float32)
        shape = self.rope, self.head_dim, self.num_layers
        return rope_table(*shape, factors, granularity, length, self.nope_layers, gains, gains_granularity)

    @classmethod
    def from_hf(cls, config: dict, where: str = "config.json") -> "LlamaConfig":
        """Read the contents of a Hugging Face `config.json`; `where` names the file in errors. Raises UserError."""
        model_type = config.get("model_type")
        mark = Mark.read(config.get(MARK_KEY), f"{where}: {MARK_KEY}")
        if model_type not in SUPPORTED_MODEL_TYPES:
            if mark is not None:  # a folder with modeling_lpes.py
                raise UserError(
                    f"{where}: the model already contains {mark}, and lpes_jax does not run code of model_type "
                    f"{model_type!r:.60}; use the model that it was exported from"
                )
            raise UserError(
                f"{where}: model_type {model_type!r:.60} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        for key, (implemented, families) in _IMPLEMENTED.items():
            if model_type not in families and config.get(key, implemented) not in (implemented, None):
                raise UserError(f"{where}: {key}={config[key]!r:.60} is not supported for {model_type} (only {implemented!r})")
        config = _FAMILIES[model_type][1] | config
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
        if missing := [key for key in needed if config.get(key) is None]:
            raise UserError(f"{where}: {', '.join(missing)} missing; is this the config.json of a Llama-architecture model?")

        def whole(key: str, default: int | None = None) -> int:
            value = default if config.get(key) is None else config[key]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise UserError(f"{where}: {key} must be a positive whole number, got {value!r:.60}")
            return value

        def flag(key: str) -> bool:
            if not isinstance(value := config.get(key), bool | None):
                raise UserError(f"{where}: {key} must be true or false, got {value!r:.60}")
            return bool(value)

        hidden, heads, eps = whole("hidden_size"), whole("num_attention_heads"), config["rms_norm_eps"]
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < math.inf:
            raise UserError(f"{where}: rms_norm_eps must be a positive number, got {eps!r:.60}")
        if config.get("head_dim") is None and hidden % heads:
            raise UserError(f"{where}: hidden_size {hidden} cannot be divided into {heads} heads, and there is no head_dim")
        entries = [config, *(config[key] for key in ("rope_scaling", "rope_parameters") if isinstance(config.get(key), dict))]
        no_theta = all(entry.get("rope_theta") is None for entry in entries)
        if model_type == "llama" and no_theta and not config.get("rope_parameters"):  # a newer key than rope_theta
            warnings.warn(f"{where}: no rope_theta; using 10000, which Llama 1 and 2 were trained with", stacklevel=2)
            config["rope_theta"] = 10_000.0
        rope = RopeParameters.from_hf(config, where)
        if model_type == "phi3" and rope.rope_type not in ("default", "longrope"):
            raise UserError(f"{where}: RoPE type {rope.rope_type!r} is not supported for phi3; supported: default, longrope")
        if model_type != "phi3" and rope.partial_rotary_factor != 1:
            raise UserError(
                f"{where}: partial_rotary_factor={rope.partial_rotary_factor!r} is not supported for {model_type} (only 1.0)"
            )
        if (layers := whole("num_hidden_layers")) > _MOST_LAYERS:  # before anything is made per layer
            raise UserError(f"{where}: num_hidden_layers is {layers:,}; no model has more than {_MOST_LAYERS:,}")
        nope_layers = _nope_layers(config, layers, where) if model_type == "smollm3" else ()
        sliding_window, sliding_layers = _windows(config, layers, nope_layers, where)
        return cls(
            vocab_size=whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=whole("num_key_value_heads", heads),
            head_dim=whole("head_dim", hidden // heads),
            rms_norm_eps=float(eps),
            max_position_embeddings=whole("max_position_embeddings"),
            rope=rope,
            tie_word_embeddings=flag("tie_word_embeddings"),
            model_type=model_type,
            attention_bias=flag("attention_bias") and model_type != "qwen2",
            mlp_bias=flag("mlp_bias"),
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            nope_layers=nope_layers,
            mark=mark,
        )

    def to_hf(self) -> dict:
        """The `config.json` that transformers reads for this model."""
        config = {
            "architectures": [_FAMILIES[self.model_type][0]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope.to_hf(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "pad_token_id": None,  # without this entry, some families use an id beyond a small vocabulary
        }
        config |= {key: True for key in ("attention_bias", "mlp_bias") if getattr(self, key)}
        if self.model_type != "llama":
            config["sliding_window"] = self.sliding_window
        if self.model_type in _WITH_LAYER_TYPES:
            config["use_sliding_window"] = bool(self.sliding_layers)
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [kinds[layer in self.sliding_layers] for layer in range(self.num_layers)]
        if self.model_type == "smollm3":
            config["no_rope_layers"] = [int(layer not in self.nope_layers) for layer in range(self.num_layers)]
        if self.mark is not None:
            config[MARK_KEY] = self.mark.record
        if self.rope.rope_type == "longrope":  # transformers' Phi-3 reads it only here
            config["original_max_position_embeddings"] = self.rope.original_max_position_embeddings
        return config


def _nope_layers(config: dict, layers: int, where: str) -> tuple[int, ...]:
    """SmolLM3: the layers with a 0 in `no_rope_layers`, or else every `no_rope_layer_interval`-th layer."""
    if (uses_rope := config.get("no_rope_layers")) is None:
        interval = config["no_rope_layer_interval"]
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise UserError(f"{where}: no_rope_layer_interval must be a positive whole number, got {interval!r:.60}")
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(uses_rope, list) or len(uses_rope) < layers or any(use not in (0, 1) for use in uses_rope):
        raise UserError(f"{where}: no_rope_layers must hold a 0 or a 1 for each of {layers} layers, got {uses_rope!r:.60}")
    return tuple(layer for layer in range(layers) if not uses_rope[layer])


def _windows(config: dict, layers: int, nope_layers: tuple[int, ...], where: str) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, and the layers that use it."""
    window, use, types = (config.get(key) for key in ("sliding_window", "use_sliding_window", "layer_types"))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 2**31):
        raise UserError(f"{where}: sliding_window must be a positive whole number or null, got {window!r:.60}")
    if not isinstance(use, bool | None):
        raise UserError(f"{where}: use_sliding_window must be true or false, got {use!r:.60}")
    if config["model_type"] not in _WITH_LAYER_TYPES:
        if use is False and window is not None:
            raise UserError(
                f"{where}: sliding_window={window} but use_sliding_window=False; set the first to null if it is off"
            )
        return window, tuple(range(layers)) if window is not None else ()
    window = window if use else None
    if types is None:
        if config["model_type"] == "smollm3":
            sliding = nope_layers
        else:
            first = config["max_window_layers"]
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise UserError(f"{where}: max_window_layers must be a whole number, got {first!r:.60}")
            sliding = tuple(range(first, layers))
        return (window, sliding) if window is not None and sliding else (None, ())
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"{where}: layer_types must name a type for each of {layers} layers, got {types!r:.60}")
    if unknown := [kind for kind in types if kind not in ("full_attention", "sliding_attention")]:
        raise UserError(
            f"{where}: {unknown[0]!r:.60} in layer_types is not supported; supported: full_attention, sliding_attention"
        )
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if sliding and window is None:
        raise UserError(f"{where}: layer_types names sliding layers, but use_sliding_window or sliding_window is not set")
    return (window, sliding) if sliding else (None, ())
