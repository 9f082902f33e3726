"""Rotary position embeddings as data: a table `[L, G, R/2]` that the model takes as an argument.

    f'(x, i) = f(x, i / s)                                              (paper, Eq. 2)

Dividing all positions of a layer by its factor s is the same as dividing the layer's inverse frequencies by s. LPES, position
interpolation and finer factors are therefore all tables: row l has the inverse frequencies of layer l, either once (G = 1) or
once per KV group (G = K). No position information is baked into a model or cached.

A table has a second column, the gains. A gain multiplies its frequency's part of q . k. It is applied to the queries only:
their cos and sin are multiplied by it in the table's precision. A gain of 1 changes no bit, and cached keys never change.
Dimensions that are not rotated (partial rotary) have no gain. Layers without RoPE (NoPE) have none either; `rotates` marks
them, because a frequency of 0 means that the position does not turn, not that the layer has no RoPE.

The checkpoint's own RoPE may be of any type in `ROPE_TYPES`. Factors divide the frequencies of that type; its scaling of cos
and sin is kept. Two types depend on the length of the text: `dynamic` raises the base beyond the trained window, and `longrope`
has one list of divisors up to the trained window and one beyond. Each call uses one table, chosen by the longest prompt of the
call plus its answer budget. Cached decoding therefore equals full recomputation. Up to the trained window the base is exactly
theta.

Letters: L layers, K key-value heads (KV groups), G = 1 or K, D head dim, R rotated part of it, T tokens, B batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.choices import GRANULARITIES, Granularity
from lpes_jax.errors import ArrayError, UserError

_LEFT_OUT: Any = None  # a field of RopeTable that __post_init__ fills in
_AXES = {"layer": 1, "layer_band": 2, "layer_group": 2, "layer_group_band": 3}  # of one individual's factors

# Each type and its own keys; transformers' `modeling_rope_utils.py` is the reference for all of them.
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
# Keys that are read but not kept: two specify yarn's attention factor in another way, one says how a model was trained.
_READ_KEYS = {"yarn": ("mscale", "mscale_all_dim", "finetuned")}
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
ROPE_TYPES = tuple(_KEYS)
_MOST = 1e15  # far above any RoPE parameter; values of a damaged config must not overflow


@dataclass(frozen=True)
class RopeParameters:
    """The RoPE of a checkpoint; fields are named as in Hugging Face's `rope_parameters` (transformers v5).

    Derived values are computed here. `attention_factor` is the multiplier of cos and sin. `original_max_position_embeddings` is
    the trained window in positions, for the types that use it (including `dynamic`).
    """

    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"RoPE type {self.rope_type!r} is not one of {', '.join(ROPE_TYPES)}")

    @classmethod
    def from_hf(cls, config: dict, where: str = "config.json") -> "RopeParameters":
        """Read a v5 config (`rope_parameters`) or a v4 config (`rope_theta`, `rope_scaling` with `type` or `rope_type`).

        Args:
            config: The contents of config.json.
            where: Its name in error messages.

        Raises:
            UserError: The RoPE type or a key is not implemented, keys contradict each other, or theta is missing. There is no
                default theta: a silent 10000 breaks Qwen and Llama 3 models.
        """
        newer, older = (_keys_of(config, name, where) for name in ("rope_parameters", "rope_scaling"))
        given = older or newer  # if both are present, transformers uses the older name
        kind = _agreed(f"{where}: the RoPE type", given.get("rope_type"), given.get("type"), default="default")
        kind = "longrope" if kind == "su" else kind  # its first name, in early Phi-3 files
        if kind not in ROPE_TYPES:
            raise UserError(f"{where}: RoPE type {kind!r:.60} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if older and newer.get("rope_type", "default") not in ("default", kind):
            raise UserError(f"{where}: rope_scaling and rope_parameters have different types; delete the wrong one")
        if unknown := sorted(given.keys() - {*_COMMON_KEYS, *_KEYS[kind], *_READ_KEYS.get(kind, ())}):
            takes = ", ".join(("rope_theta", "partial_rotary_factor", *_KEYS[kind]))
            raise UserError(f"{where}: {', '.join(unknown)} of RoPE type {kind!r} is not supported; it takes: {takes}")
        theta = _agreed(f"{where}: rope_theta", given.get("rope_theta"), config.get("rope_theta"), newer.get("rope_theta"))
        if theta is None:
            raise UserError(
                f"{where}: no rope_theta at the top level or in rope_parameters; add the one the model was trained with"
            )

        def number(name: str, value: Any) -> float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
                raise UserError(f"{where}: {name} of RoPE type {kind!r} must be a number above 0, got {value!r:.60}")
            return float(value)

        def numbers(name: str) -> tuple[float, ...]:
            if not isinstance(given.get(name), list | tuple):
                raise UserError(f"{where}: {name} of RoPE type {kind!r} must be a list of numbers, got {given.get(name)!r:.60}")
            return tuple(number(name, value) for value in given[name])

        def window(name: str, value: Any) -> int:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 < value < 2**31:
                raise UserError(f"{where}: {name} of RoPE type {kind!r} must be a whole number above 1, got {value!r:.60}")
            return value

        top, partial = config.get("partial_rotary_factor"), given.get("partial_rotary_factor")
        partial = number("partial_rotary_factor", _agreed(f"{where}: partial_rotary_factor", partial, top, default=1.0))
        if partial > 1:
            raise UserError(f"{where}: partial_rotary_factor must be at most 1, got {partial!r}")
        values: dict[str, Any] = {"partial_rotary_factor": partial}
        longest = config.get("max_position_embeddings")
        if kind == "dynamic":
            values["original_max_position_embeddings"] = window("max_position_embeddings", longest)
        elif kind in ("yarn", "llama3", "longrope"):
            name = "original_max_position_embeddings"
            values[name] = _agreed(f"{where}: {name}", given.get(name), config.get(name))
            if values[name] is None and kind == "yarn":
                values[name] = longest
            values[name] = window(name, values[name])
        if kind != "default":
            factor = given.get("factor")
            if factor is None and kind in ("yarn", "longrope"):
                factor = window("max_position_embeddings", longest) / values["original_max_position_embeddings"]
            values["factor"] = number("factor", factor)
        for name in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            if name in _KEYS[kind] and (name in given or kind == "llama3"):
                values[name] = number(name, given.get(name))
        if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
            raise UserError(f"{where}: high_freq_factor of RoPE type 'llama3' must be above low_freq_factor")
        if not isinstance(truncate := given.get("truncate", True), bool):
            raise UserError(f"{where}: truncate of RoPE type {kind!r} must be true or false, got {truncate!r:.60}")
        values["truncate"] = truncate
        if kind == "longrope":
            values |= {name: numbers(name) for name in ("short_factor", "long_factor")}
        if kind in ("yarn", "longrope"):
            read = {
                name: number(name, given[name]) for name in ("attention_factor", "mscale", "mscale_all_dim") if name in given
            }
            original = values["original_max_position_embeddings"]
            values["attention_factor"] = _attention_factor(kind, values["factor"], original, **read)
        if number("rope_theta", theta) <= 1:
            raise UserError(f"{where}: rope_theta must be above 1, got {theta!r}")
        return cls(rope_theta=float(theta), rope_type=kind, **values)

    def to_hf(self) -> dict:
        """The v5 `rope_parameters` entry. (`dynamic` reads its window from the config's `max_position_embeddings`.)"""
        values = {key: getattr(self, key) for key in _KEYS[self.rope_type]}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        partial = {} if self.partial_rotary_factor == 1 else {"partial_rotary_factor": self.partial_rotary_factor}
        return {"rope_type": self.rope_type, "rope_theta": self.rope_theta, **partial, **values}

    def rotary_dim(self, head_dim: int) -> int:
        """R: the number of rotated elements of a head, which are its first ones."""
        return int(head_dim * self.partial_rotary_factor)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTable:
    """What the model needs to rotate: `inv_freq` in radians per position, and the multipliers of cos and sin.

    `gains` multiply each frequency's part of q . k (default: 1); their G is independent of that of `inv_freq`. `rotates` marks
    the layers that have RoPE (default: all). The other layers have frequencies of 0, gains of 1 and no attention scaling.
    """

    inv_freq: Float[Array, "*population L G half"]
    attention_scaling: Float[Array, "*tables"]
    gains: Float[Array, "*gain_tables L H half"] = _LEFT_OUT
    rotates: Bool[Array, "*masks L"] = _LEFT_OUT

    def __post_init__(self) -> None:
        if isinstance(self.inv_freq, Array | np.ndarray):  # JAX rebuilds pytrees with other objects as leaves
            if self.gains is None:
                object.__setattr__(self, "gains", jnp.ones_like(self.inv_freq))
            if self.rotates is None:
                object.__setattr__(self, "rotates", jnp.ones(self.inv_freq.shape[:-2], bool))

    @property
    def layer_scaling(self) -> Float[Array, "*tables L"]:
        """The multiplier of each layer's cos and sin: `attention_scaling`, or 1 in a layer without RoPE."""
        scaling = jnp.asarray(self.attention_scaling)[..., None]
        return jnp.where(self.rotates, scaling, jnp.ones_like(scaling))

    def scaled(self, factors: Float[Array, "..."], granularity: Granularity = "layer") -> "RopeTable":
        """The table with its frequencies divided by factors (see `scale_layers`)."""
        return replace(self, inv_freq=scale_layers(self.inv_freq, factors, granularity))

    def multiplied(self, multipliers: Float[Array, "..."], granularity: Granularity = "layer") -> "RopeTable":
        """The table with its frequencies times multipliers; a multiplier of 0 stops the rotation of a frequency."""
        return replace(self, inv_freq=self.inv_freq * expand(multipliers, self.inv_freq.shape[-1], granularity))

    def with_gains(self, gains: Float[Array, "..."], granularity: Granularity = "layer") -> "RopeTable":
        """The table with other gains, of any granularity; layers without RoPE keep 1."""
        wide = expand(gains, self.inv_freq.shape[-1], granularity)
        return replace(self, gains=jnp.where(self.rotates[..., None, None], wide, jnp.ones_like(wide)))


def inverse_frequencies(rope: RopeParameters, head_dim: int, length: int = 0) -> Float[Array, "half"]:
    """theta^(-2i/R) for i < R/2, modified by the RoPE type; float32, in radians per position.

    Args:
        rope: The checkpoint's RoPE.
        head_dim: D.
        length: Tokens of the longest text of the call; used by `dynamic` and `longrope` only.
    """
    # In NumPy: XLA's power differs in the last bits between eager and compiled programs.
    dim, theta, original = rope.rotary_dim(head_dim), rope.rope_theta, rope.original_max_position_embeddings
    if rope.rope_type == "dynamic" and length > original:
        theta *= (rope.factor * length / original - (rope.factor - 1)) ** (dim / (dim - 2))
    inv_freq = theta ** (-np.arange(0, dim, 2) / dim)
    if rope.rope_type == "linear":
        inv_freq = jnp.asarray(inv_freq, jnp.float32)
        return _divide(inv_freq, jnp.full_like(inv_freq, rope.factor))
    if rope.rope_type == "yarn":
        inv_freq = _yarn(rope, inv_freq)
    elif rope.rope_type == "llama3":
        # Kept: frequencies with at least high_freq_factor turns in the trained window. Divided: at most low_freq_factor turns.
        turns = original * inv_freq / (2 * math.pi)
        kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        inv_freq = inv_freq * kept + inv_freq / rope.factor * (1 - kept)
    elif rope.rope_type == "longrope":
        inv_freq = inv_freq / np.array(rope.long_factor if length > original else rope.short_factor)
    return jnp.asarray(inv_freq, jnp.float32)


def is_traced(value: Any) -> bool:
    """Whether the value is a tracer of `jax.jit` or `jax.grad`, which has a shape but no numbers yet."""
    return isinstance(value, Tracer)


def scale_layers(
    inv_freq: Float[Array, "*rows half"], factors: Float[Array, "..."], granularity: Granularity = "layer"
) -> Float[Array, "*population L G half"]:
    """Inverse frequencies of every layer: `inv_freq` divided by the layer's factor (paper, Eq. 2 and 5).

    Differentiable in `factors`; works under jit and vmap.

    Args:
        inv_freq: `[R/2]`, or a table's `[L, 1, R/2]`.
        factors: `[L]` (`layer`), `[L, bands]` (`layer_band`: equal bands of a layer's R/2 frequencies, highest first), `[L, K]`
            (`layer_group`) or `[L, K, bands]` (`layer_group_band`), with any leading population axes.
        granularity: What has a factor of its own.

    Raises:
        ArrayError: The bands do not divide R/2, or the factors and the table have different numbers of layers (a single factor
            is not broadcast to all layers).
    """
    axes = _axes(factors, granularity, "factors")
    layers = factors.shape[-axes]
    if inv_freq.ndim > 1 and layers != len(inv_freq):
        raise ArrayError(f"{layers} layers of factors, but the table has {len(inv_freq)}; give each layer its own")
    return _divide(inv_freq, expand(factors, inv_freq.shape[-1], granularity))


def _axes(values: Float[Array, "..."], granularity: Granularity, what: str) -> int:
    """The number of axes of one individual's values. Raises ArrayError for values with fewer axes."""
    axes = _AXES.get(granularity, 0)
    if not axes:
        raise ArrayError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    if values.ndim < axes or not values.size:
        raise ArrayError(f"granularity {granularity} needs {what} of {axes} axes, got shape {list(values.shape)}")
    return axes


def expand(values: Float[Array, "..."], half: int, granularity: Granularity = "layer") -> Float[Array, "*population L G half"]:
    """Expand factors or gains of a granularity (see `scale_layers`) to one value per frequency; a head has `half` of them."""
    _axes(values, granularity, "values")
    if granularity == "layer":
        values = values[..., :, None, None]
    elif granularity == "layer_band":
        values = values[..., :, None, :]
    elif granularity == "layer_group":
        values = values[..., :, :, None]
    bands = values.shape[-1]
    if half % bands:
        raise ArrayError(f"{bands} bands do not divide the {half} frequencies of a head")
    return jnp.repeat(values, half // bands, axis=-1)


def rope_table(
    rope: RopeParameters,
    head_dim: int,
    num_layers: int,
    factors: Float[Array, "..."] | None = None,
    granularity: Granularity = "layer",
    length: int = 0,
    nope_layers: Sequence[int] = (),
    gains: Float[Array, "..."] | None = None,
    gains_granularity: Granularity = "layer",
) -> RopeTable:
    """The table of a model. For a loaded model, `model.config.rope_table` fills in the arguments.

    Args:
        rope: The checkpoint's RoPE.
        head_dim: D.
        num_layers: L.
        factors: See `scale_layers`; None keeps the checkpoint's frequencies in each layer.
        granularity: Granularity of the factors.
        length: See `inverse_frequencies`.
        nope_layers: Layers that are not rotated.
        gains: Of the same shapes as factors; None means 1.
        gains_granularity: Granularity of the gains.

    Raises:
        ArrayError: As `scale_layers`.
    """
    inv_freq = inverse_frequencies(rope, head_dim, length)
    rotates = np.ones(num_layers, bool)
    rotates[list(nope_layers)] = False
    layers = inv_freq * rotates[:, None, None].astype(np.float32)
    table = RopeTable(layers, jnp.full((), rope.attention_factor, inv_freq.dtype), rotates=jnp.asarray(rotates))
    if factors is not None:
        table = table.scaled(factors, granularity)
    return table if gains is None else table.with_gains(gains, gains_granularity)


def cos_sin(
    inv_freq: Float[Array, "G half"], attention_scaling: Float[Array, ""], positions: Int[Array, "*batch T"]
) -> tuple[Float[Array, "*batch T G half"], Float[Array, "*batch T G half"]]:
    """cos and sin of position x inverse frequency for one layer. Angles are float32 (float64 for a float64 table).

    `attention_scaling` is the layer's own (`RopeTable.layer_scaling`). For queries, multiply both results by the layer's gains.
    """
    angles = positions[..., None, None].astype(inv_freq.dtype) * inv_freq
    return jnp.cos(angles) * attention_scaling, jnp.sin(angles) * attention_scaling


def apply_gains(x: Float[Array, "*batch T heads D"], gains: Float[Array, "G half"]) -> Float[Array, "*batch T heads D"]:
    """Multiply queries that are not yet rotated by their gains; computed as in `rotate`."""
    head = gains_of_head(gains, x.shape[-1])
    heads = jnp.repeat(head, x.shape[-2] // len(head), axis=0)
    return (x.astype(np.promote_types(x.dtype, gains.dtype)) * heads).astype(x.dtype)


def gains_of_head(gains: Float[Array, "*layers G half"], head_dim: int) -> Float[Array, "*layers G D"]:
    """The gain of each element of a head. Elements i and i + R/2 rotate together; elements that are not rotated have 1."""
    rest = jnp.ones((*gains.shape[:-1], head_dim - 2 * gains.shape[-1]), gains.dtype)
    return jnp.concatenate([gains, gains, rest], axis=-1)


def rotate(
    x: Float[Array, "*batch T heads D"], cos: Float[Array, "*any T G half"], sin: Float[Array, "*any T G half"]
) -> Float[Array, "*batch T heads D"]:
    """Rotate queries or keys, half-split layout (element i pairs with i + R/2, as Hugging Face stores it).

    Elements from R = 2 x half on are unchanged. With G = K the heads of a group are adjacent: head h belongs to group
    h // (heads / K). The result is computed in float32 (or the table's own dtype, if wider) and cast back.
    """
    dtype, half = np.promote_types(x.dtype, cos.dtype), cos.shape[-1]
    repeats = x.shape[-2] // cos.shape[-2] if cos.shape[-2] > 1 else 1
    cos, sin = (jnp.repeat(table, repeats, axis=-2) if repeats > 1 else table for table in (cos, sin))
    first, second = (part.astype(dtype) for part in (x[..., :half], x[..., half : 2 * half]))
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def _divide(inv_freq: Float[Array, "*rows half"], factors: Float[Array, "*any"]) -> Float[Array, "*any"]:
    # On some paths XLA turns a division by a broadcast value into a product with its reciprocal, which differs in the last bit.
    # We always multiply by the reciprocal, so uniform factors equal `linear` RoPE bit for bit.
    return inv_freq * (1 / factors)


def _yarn(rope: RopeParameters, inv_freq: Float[np.ndarray, "half"]) -> Float[np.ndarray, "half"]:
    # YaRN (arXiv:2309.00071, section 3.2): frequencies that turn at least beta_fast times in the trained window are kept, those
    # that turn at most beta_slow times are divided by the factor, with a linear ramp over the index in between.
    half = len(inv_freq)

    def index_that_turns(times: float) -> float:
        window = rope.original_max_position_embeddings
        return half * math.log(window / (times * 2 * math.pi)) / math.log(rope.rope_theta)

    low, high = index_that_turns(rope.beta_fast), index_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / (high - low if high != low else 0.001), 0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _attention_factor(
    kind: str,
    factor: float,
    original: int,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> float:
    if attention_factor is not None:
        return attention_factor
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if mscale is None or mscale_all_dim is None:
        return 0.1 * math.log(factor) + 1
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)


def _keys_of(config: dict, name: str, where: str) -> dict[str, Any]:
    """An entry of the config without its null values."""
    entry = config.get(name)
    if not isinstance(entry, dict | None):
        raise UserError(f"{where}: {name} must be a JSON object or null, got {entry!r:.60}")
    return {key: value for key, value in (entry or {}).items() if value is not None}


def _agreed(what: str, *values: Any, default: Any = None) -> Any:
    """The value that is given, in one or several entries. Raises UserError if they differ."""
    given = [value for value in values if value is not None]
    # NaN equals nothing, so two NaNs count as agreeing here; the checks of numbers report NaN.
    if others := [value for value in given if value != given[0] and (value == value or given[0] == given[0])]:
        raise UserError(f"{what} is given as {given[0]!r:.40} and as {others[0]!r:.40}; delete the wrong one")
    return given[0] if given else default
