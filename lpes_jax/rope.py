"""Rotary position embeddings as data: a table `[L, G, D/2]` that the model takes as an argument.

    f'(x, i) = f(x, i / s)                                              (paper, Eq. 2)

Dividing every position of a layer by its factor s is dividing that layer's inverse frequencies by s. So LPES, position
interpolation and finer factors are all tables: row l holds the inverse frequencies of layer l, once (G = 1) or once for
each KV group (G = K). Nothing about positions is baked into a model or cached.

Letters: L layers, K key-value heads (KV groups), G = 1 or K, D head dim, T tokens, B batch.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError

Granularity = Literal["layer", "layer_band", "layer_group", "layer_group_band"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
ROPE_TYPES = ("default", "linear")


@dataclass(frozen=True)
class RopeParameters:
    """The RoPE of a checkpoint, as Hugging Face names its parts (`rope_parameters` in transformers v5).

    `factor` is used by `linear` alone: positions divided by one number in every layer.
    """

    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0

    @classmethod
    def from_hf(cls, config: dict, where: str = "config.json") -> "RopeParameters":
        """From a v5 (`rope_parameters`) or v4 (`rope_theta`, `rope_scaling` with `type` or `rope_type`) config.

        Raises UserError for a RoPE type that is not implemented, and where no theta is given: a silent 10000 is how
        Qwen and Llama 3 models get broken.
        """
        parameters = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or parameters  # where both stand, transformers goes by the older key
        theta = scaling.get("rope_theta", config.get("rope_theta", parameters.get("rope_theta")))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise UserError(f"{where}: RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if theta is None:
            raise UserError(
                f"{where}: no rope_theta, neither at the top nor in rope_parameters; add the one the model was trained with"
            )
        if (rotated := scaling.get("partial_rotary_factor")) not in (None, 1.0):
            raise UserError(f"{where}: partial_rotary_factor={rotated!r} is not supported (only 1.0)")
        numbers: dict[str, Any] = {"rope_theta": theta} | ({"factor": scaling.get("factor")} if kind == "linear" else {})
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{where}: {name} of RoPE type {kind!r} must be a number above 0, got {value!r}")
        return cls(rope_type=kind, **{name: float(value) for name, value in numbers.items()})

    def to_hf(self) -> dict:
        """The v5 `rope_parameters` entry."""
        linear = {"factor": self.factor} if self.rope_type == "linear" else {}
        return {"rope_type": self.rope_type, "rope_theta": self.rope_theta, **linear}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTable:
    """What the model needs to rotate: `inv_freq` in radians per position, and what cos and sin are multiplied by.

    A zero row leaves its layer unrotated (NoPE).
    """

    inv_freq: Float[Array, "*population L G half"]
    attention_scaling: Float[Array, ""]


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Float[Array, "half"]:
    """theta^(-2i/D) for i < D/2, float32, in radians per position; `linear` divides them by its factor."""
    # In NumPy: XLA's power differs in the last bits between eager and compiled programs.
    inv_freq = jnp.asarray(rope.rope_theta ** (-np.arange(0, head_dim, 2) / head_dim), jnp.float32)
    if rope.rope_type == "linear":
        return _divide(inv_freq, jnp.full_like(inv_freq, rope.factor))
    return inv_freq


def scale_layers(
    inv_freq: Float[Array, "half"], factors: Float[Array, "..."], granularity: Granularity = "layer"
) -> Float[Array, "*population L G half"]:
    """Inverse frequencies of every layer: `inv_freq` divided by the layer's factor (paper, Eq. 2 and 5).

    `factors` is `[L]` (`layer`), `[L, bands]` (`layer_band`: the D/2 frequencies of a layer in equal bands, highest first),
    `[L, K]` (`layer_group`) or `[L, K, bands]` (`layer_group_band`), with any leading population axes. Differentiable in
    `factors`, jit- and vmap-able. Raises ValueError where the bands do not divide D/2.
    """
    half = inv_freq.shape[0]
    if granularity == "layer":
        factors = factors[..., :, None, None]
    elif granularity == "layer_band":
        factors = factors[..., :, None, :]
    elif granularity == "layer_group":
        factors = factors[..., :, :, None]
    elif granularity != "layer_group_band":
        raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    bands = factors.shape[-1]
    if half % bands:
        raise ValueError(f"{bands} bands do not divide the {half} frequencies of a head")
    return _divide(inv_freq, jnp.repeat(factors, half // bands, axis=-1))


def rope_table(
    rope: RopeParameters,
    head_dim: int,
    num_layers: int,
    factors: Float[Array, "..."] | None = None,
    granularity: Granularity = "layer",
) -> RopeTable:
    """The table of a model, with `factors` (see `scale_layers`) or, without any, the checkpoint's own in each layer."""
    inv_freq = inverse_frequencies(rope, head_dim)
    if factors is None:
        layers = jnp.broadcast_to(inv_freq, (num_layers, 1, head_dim // 2))
    else:
        layers = scale_layers(inv_freq, factors, granularity)
    return RopeTable(layers, jnp.ones((), inv_freq.dtype))


def cos_sin(
    inv_freq: Float[Array, "G half"], attention_scaling: Float[Array, ""], positions: Int[Array, "*batch T"]
) -> tuple[Float[Array, "*batch T G half"], Float[Array, "*batch T G half"]]:
    """cos and sin of position x inverse frequency for one layer. Angles are float32 (float64 for a float64 table)."""
    angles = positions[..., None, None].astype(inv_freq.dtype) * inv_freq
    return jnp.cos(angles) * attention_scaling, jnp.sin(angles) * attention_scaling


def rotate(
    x: Float[Array, "*batch T heads D"], cos: Float[Array, "*any T G half"], sin: Float[Array, "*any T G half"]
) -> Float[Array, "*batch T heads D"]:
    """Rotate queries or keys, half-split layout (element i pairs with i + D/2, as Hugging Face stores it).

    With G = K the heads of a group stand next to each other: head h belongs to group h // (heads / K). Computed in float32
    (or the table's own dtype, if wider) and cast back.
    """
    dtype = np.promote_types(x.dtype, cos.dtype)
    repeats = x.shape[-2] // cos.shape[-2] if cos.shape[-2] > 1 else 1
    cos, sin = (jnp.repeat(table, repeats, axis=-2) if repeats > 1 else table for table in (cos, sin))
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _divide(inv_freq: Float[Array, "half"], factors: Float[Array, "*any"]) -> Float[Array, "*any"]:
    # XLA turns a division by a broadcast value into a product with its reciprocal on some paths and not on others, which
    # differs in the last bit. Written as the product everywhere, uniform factors equal `linear` RoPE bit for bit.
    return inv_freq * (1 / factors)
