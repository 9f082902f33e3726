"""The Llama decoder in Flax NNX: stacked layers, scanned together with the rows of a RoPE table.

One model for all families of `config.py`. The config decides about biases, norms of queries and keys, and windows.

The module is a pytree (NNX tree mode). Pass it to `jax.jit`, `jax.vmap` and `jax.grad` as an argument. Never close over it, or
its weights become constants of the program. It contains no position information: every call takes a `RopeTable`.

`run_layers` is the only forward pass. Its attention is an argument: `hidden_states` and `prefill` use causal attention over
prompts or a method's attention (`method.py`), `prefix.py` attention over shared prefixes, `generate.py` over a cache.

Letters: B batch, T tokens, S or M tokens that are read, L layers, H heads, K key-value heads, D head dim, E embedding,
V vocabulary, n tables.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.models.llama.attention import cached_attention, causal_attention
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.eight_bits import PROJECTIONS, EightBits, EightBitWeights, stacked
from lpes_jax.models.llama.method import Channel, Layer, Method, Replacement
from lpes_jax.models.llama.packed import Packed, Weights, dense
from lpes_jax.rope import RopeTable, apply_gains, cos_sin, rotate

KeyValues = tuple[Float[Array, "*layers B T K D"], Float[Array, "*layers B T K D"]]
Scaled = Callable[[], tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]]
_SHORT = 256  # for rows with fewer tokens, compiling the last layer separately takes longer than it saves
_ROWS_AT_ONCE = 32  # queries with a scaled channel that are computed at once, with their logits over all keys


class Layers(nnx.Module):
    """The weights of all decoder layers, stacked on a leading layer axis and stored as [in, out].

    The loader may put packed matrices (`packed.py`) in place of those with three axes.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        c = config
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(_normal(rngs, (c.num_layers, *shape), dtype))

        self.attention_norm = nnx.Param(jnp.ones((c.num_layers, c.hidden_size), dtype))
        self.query = normal(c.hidden_size, heads)
        self.key = normal(c.hidden_size, kv)
        self.value = normal(c.hidden_size, kv)
        self.output = normal(heads, c.hidden_size)
        self.mlp_norm = nnx.Param(jnp.ones((c.num_layers, c.hidden_size), dtype))
        self.gate = normal(c.hidden_size, c.intermediate_size)
        self.up = normal(c.hidden_size, c.intermediate_size)
        self.down = normal(c.intermediate_size, c.hidden_size)

        def bias(present: bool, size: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros((c.num_layers, size), dtype)) if present else None

        self.query_bias = bias(c.qkv_bias, heads)
        self.key_bias = bias(c.qkv_bias, kv)
        self.value_bias = bias(c.qkv_bias, kv)
        self.output_bias = bias(c.attention_bias, c.hidden_size)
        self.gate_bias = bias(c.mlp_bias, c.intermediate_size)
        self.up_bias = bias(c.mlp_bias, c.intermediate_size)
        self.down_bias = bias(c.mlp_bias, c.hidden_size)
        self.query_norm = nnx.Param(jnp.ones((c.num_layers, c.head_dim), dtype)) if c.qk_norm else None
        self.key_norm = nnx.Param(jnp.ones((c.num_layers, c.head_dim), dtype)) if c.qk_norm else None


class Llama(nnx.Module):
    """A Llama-architecture language model. `head` is None if the embedding is tied to the output."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.embed = nnx.Param(_normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.layers = Layers(config, rngs=rngs, dtype=dtype)
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        tied = config.tie_word_embeddings
        self.head = None if tied else nnx.Param(_normal(rngs, (config.hidden_size, config.vocab_size), dtype))


class LayerContext(NamedTuple):
    """The arguments of an attention in addition to queries, keys and values.

    Attributes:
        row: The layer's row of the RoPE table, and the method's parameters for it.
        own: The layer's part of the pass's own data (its window, its cache).
        read: Indices of the tokens that have queries; None means all.
        scaled: Computes queries and keys of hidden states with the method's channel scaled; None for other methods.
    """

    row: Layer
    own: Any
    read: Int[Array, "B S"] | None
    scaled: Scaled | None


# (q [B, S, H, D], k and v [B, T, K, D], before rotation; context) -> the attention's output [B, S, H, D], a value for `keep`
Attend = Callable[[Array, Array, Array, LayerContext], tuple[Array, Any]]


def run_layers(
    model: Llama,
    x: Float[Array, "B T E"],
    rows: Layer,
    attend: Attend,
    own: Any = None,
    *,
    read: Int[Array, "B M"] | None = None,
    remat: bool = False,
    keep: Callable[[Float[Array, "B T E"], Any], Any] = lambda x, kept: None,
) -> tuple[Float[Array, "B S E"], Any]:
    """The forward pass: all layers, each with `attend`, and the last norm. All functions that run the model call it.

    Args:
        model: The model.
        x: The embedded tokens.
        rows: The data of each layer (`layer_rows`), every leaf `[L, ...]`.
        attend: Rotates and attends. Only this function depends on positions, caches, shared prefixes and methods.
        own: The pass's own data of each layer, every leaf `[L, ...]`.
        read: Indices of the tokens whose states are returned; None means all. The last layer then has only these queries, and
            is compiled separately, except for short rows and for gradients. Not for use with `keep`.
        remat: Whether to recompute each layer in the backward pass instead of keeping its activations.
        keep: Computes what is kept of a layer, from the hidden states after it and the second value of `attend`.

    Returns:
        The normalised last hidden states (S = M with `read`, otherwise T), and the values of `keep`, stacked `[L, ...]`.
    """
    config = model.config

    def layer(x: Array, inputs: tuple[Layers, Layer, Any], read: Array | None = None) -> tuple[Array, Any]:
        weights, row, layer_own = inputs

        def attend_here(q: Array, k: Array, v: Array, scaled: Scaled | None = None) -> tuple[Array, Any]:
            return attend(q, k, v, LayerContext(row, layer_own, read, scaled))

        x, kept = decoder_layer(config, weights, x, attend_here, read, channel_of(row))
        return x, keep(x, kept)

    inputs = model.layers, rows, own
    if read is None or remat or x.shape[1] < _SHORT:  # gradients are stacked like the weights
        x, kept = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, inputs)
        x = x if read is None else jnp.take_along_axis(x, read[:, :, None], axis=1)
    else:

        def layer_inputs(number: Int[Array, ""] | int) -> Any:  # slicing off the last layer would copy the stacks
            return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), inputs)

        last = config.num_layers - 1
        x, _ = jax.lax.scan(lambda x, number: layer(x, layer_inputs(number)), x, jnp.arange(last))
        x, kept = layer(x, layer_inputs(last), read)
    return rms_norm(x, model.norm[...], config.rms_norm_eps), kept


def hidden_states(
    model: Llama,
    tokens: Int[Array, "B T"],
    table: RopeTable,
    *,
    remat: bool = False,
    replacement: Replacement | None = None,
    lengths: Int[Array, "B"] | None = None,
    tokens_after: int | None = None,
) -> Float[Array, "B T E"]:
    """The normalised last hidden states. Rows may be padded on the right: no real token sees the padding.

    Args:
        model: The model.
        tokens: Token ids.
        table: The RoPE table.
        remat: Whether to recompute each layer in the backward pass instead of keeping its activations.
        replacement: Replaces the model's own attention, or scales a channel.
        lengths: The prompts' lengths, for `replacement`; None means T.
        tokens_after: The most tokens after a prompt whose states are needed; None means all.
    """
    return _run_prompts(model, tokens, table, replacement, lengths, tokens_after, remat=remat)[0]


def prefill(
    model: Llama,
    tokens: Int[Array, "B T"],
    table: RopeTable,
    replacement: Replacement | None = None,
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T E"], KeyValues, Any]:
    """`hidden_states`, the keys and values of every layer, `[L, B, T, K, D]` each, and the state of a replacement `[L, ...]`.

    Keys are rotated, except with another attention. States after the prompts are not needed.
    """
    x, (cache, state) = _run_prompts(model, tokens, table, replacement, lengths, tokens_after=0, keep=lambda x, kept: kept)
    return x, cache, state


def states_after_layers(
    model: Llama, tokens: Int[Array, "B T"], table: RopeTable, function: Callable[[Float[Array, "B T E"]], Any]
) -> tuple[Float[Array, "B T E"], Any]:
    """`hidden_states`, and `function` of the states after each layer, before the last norm, `[L, ...]`."""
    return _run_prompts(model, tokens, table, keep=lambda x, kept: function(x))


def _run_prompts(
    model: Llama,
    tokens: Int[Array, "B T"],
    table: RopeTable,
    replacement: Replacement | None = None,
    lengths: Int[Array, "B"] | None = None,
    tokens_after: int | None = None,
    **how: Any,
) -> tuple[Float[Array, "B T E"], Any]:
    """`run_layers` over prompts padded on the right; the second value of `attend` is ((k, v), state of a replacement)."""
    config, length = model.config, tokens.shape[1]
    positions = jnp.arange(length)
    known = jnp.full(len(tokens), length, jnp.int32) if lengths is None else lengths
    last_rows = 1 if lengths is None else length if tokens_after is None else tokens_after + 1

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, tuple[KeyValues, Any]]:
        row = context.row
        if replacement is not None and replacement.attention is not None:
            out, state = replacement.attention.prefill(row, apply_gains(q, row.gains), k, v, known)
            return out, ((k, v), state)
        q, k = rotated(q, k, row, positions)
        out = within_window(config, length, context.own, _causal, q, k, v)
        if context.scaled is not None:
            window = jnp.where(context.own, config.sliding_window or length, length)
            rescaled = partial(_last_rows_scaled, out, context.scaled, v, row, known - 1, last_rows, window)
            out, k = jax.lax.cond(row.parameters.factor != 1, rescaled, lambda: (out, k))
        return out, ((k, v), None)

    rows, own = layer_rows(config, table, replacement), slides(config, length)
    return run_layers(model, model.embed[...][tokens], rows, attend, own, **how)


def slides(config: LlamaConfig, length: int) -> Bool[Array, "L"]:
    """Whether each layer's window is shorter than rows of `length` tokens, as input for `within_window`."""
    return jnp.asarray(config.windows(length) < length)


def within_window(
    config: LlamaConfig,
    length: int,
    slides: Bool[Array, ""],
    attention: Callable[[int | None], Callable[..., Array]],
    *operands: Array,
) -> Array:
    """`attention(window)` of the operands, with the layer's window. If all layers are alike, no branch is compiled."""
    is_sliding = config.windows(length) < length
    if is_sliding.all() or not is_sliding.any():
        return attention(config.sliding_window if is_sliding.all() else None)(*operands)
    return jax.lax.cond(slides, attention(config.sliding_window), attention(None), *operands)


def _causal(window: int | None) -> Callable[..., Array]:
    return partial(causal_attention, window=window)


def _last_rows_scaled(
    out: Float[Array, "B T H D"],
    scaled: Scaled,
    v: Float[Array, "B T K D"],
    row: Layer,
    last: Int[Array, "B"],
    count: int,
    window: Int[Array, ""],
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
    """`out` with `count` rows from `last` on recomputed from the scaled queries and keys; and the scaled keys, rotated."""
    q, k = rotated(*scaled(), row, jnp.arange(out.shape[1]))
    positions = last[:, None] + jnp.arange(min(count, out.shape[1]))

    def attend(q_and_position: tuple[Array, Array]) -> Array:
        q, position = q_and_position
        return cached_attention(q[:, None], k, v, position + 1, window)[:, 0]

    q = jnp.take_along_axis(q, positions[:, :, None, None], axis=1, mode="clip")
    rows_at_once = min(_ROWS_AT_ONCE, positions.shape[1])
    recomputed = jax.lax.map(attend, (q.swapaxes(0, 1), positions.T), batch_size=rows_at_once).swapaxes(0, 1)
    return out.at[jnp.arange(len(out))[:, None], positions].set(recomputed, mode="drop"), k


def channel_of(row: Layer) -> Channel | None:
    """The channel that the layer's queries and keys see scaled; None for other methods."""
    return row.parameters if isinstance(row.parameters, Channel) else None


def layer_rows(config: LlamaConfig, table: RopeTable, replacement: Replacement | None = None) -> Layer:
    """The data of each layer (`Layer`), stacked for a scan."""
    parameters = None if replacement is None else replacement.parameters
    return Layer(jnp.arange(config.num_layers), table.inv_freq, table.layer_scaling, table.gains, parameters)


def rotated(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], row: Layer, positions: Int[Array, "*batch T"]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
    """Queries and keys at the same positions, rotated by the layer's row of the table; queries have its gains."""
    cos, sin = cos_sin(row.inv_freq, row.attention_scaling, positions)
    return rotate(q, cos * row.gains, sin * row.gains), rotate(k, cos, sin)


def decoder_layer(
    config: LlamaConfig,
    layer: Layers,
    x: Float[Array, "B T E"],
    attend: Callable[..., tuple[Float[Array, "B S H D"], Any]],
    read: Int[Array, "B S"] | None = None,
    channel: Channel | None = None,
) -> tuple[Float[Array, "B S E"], Any]:
    """One decoder layer.

    Args:
        config: The model's config.
        layer: The weights of the layer.
        x: The hidden states.
        attend: `attend(q, k, v)` rotates and attends.
        read: Indices of the tokens that have queries and a new x; None means all T. Keys and values are those of all tokens.
        channel: Not for use with `read`. `attend` gets a fourth argument, which computes q and k with this channel scaled.

    Returns:
        The new x, and the second value of `attend`.
    """
    batch, length, _ = x.shape
    h = rms_norm(x, layer.attention_norm[...], config.rms_norm_eps)
    k = project(h, layer.key, layer.key_bias).reshape(batch, length, config.num_kv_heads, config.head_dim)
    v = project(h, layer.value, layer.value_bias).reshape(batch, length, config.num_kv_heads, config.head_dim)
    if read is not None:
        x, h = (jnp.take_along_axis(array, read[:, :, None], axis=1) for array in (x, h))
        length = read.shape[1]
    q = project(h, layer.query, layer.query_bias).reshape(batch, length, config.num_heads, config.head_dim)

    def normed(q: Array, k: Array) -> tuple[Array, Array]:
        if layer.query_norm is None or layer.key_norm is None:
            return q, k
        return rms_norm(q, layer.query_norm[...], config.rms_norm_eps), rms_norm(k, layer.key_norm[...], config.rms_norm_eps)

    def scaled(channel: Channel) -> tuple[Array, Array]:  # adds the channel's rows of the weights, times (factor - 1)
        wide = np.promote_types(x.dtype, jnp.float32)
        more = h[:, :, channel.number, None].astype(wide) * (channel.factor.astype(wide) - 1)
        rows = (dense(weights, x.dtype)[channel.number].astype(wide) for weights in (layer.query, layer.key))
        return normed(*(p + (more * row).reshape(p.shape).astype(p.dtype) for p, row in zip((q, k), rows, strict=True)))

    attended, kept = attend(*normed(q, k), v, *(() if channel is None else (partial(scaled, channel),)))
    x = x + project(attended.reshape(batch, length, -1), layer.output, layer.output_bias)
    h = rms_norm(x, layer.mlp_norm[...], config.rms_norm_eps)
    gated = jax.nn.silu(project(h, layer.gate, layer.gate_bias)) * project(h, layer.up, layer.up_bias)
    x = x + project(gated, layer.down, layer.down_bias)
    return x, kept


def output_logits(model: Llama, hidden: Float[Array, "*any E"]) -> Float[Array, "*any V"]:
    """float32 logits (float64 for a float64 model) of hidden states. Pass only positions that are read: logits are large."""
    weights = model.embed[...].T if model.head is None else model.head[...]
    return _dot(hidden, weights, np.promote_types(hidden.dtype, jnp.float32))


def method_model(model: Llama, method: Method) -> Llama:
    """The model that runs with a method: with scaled outputs of the attention, a copy with the scales in its weights."""
    return model if method.output_scales is None else with_scaled_outputs(model, method.output_scales)


def with_scaled_outputs(model: Llama, scales: Float[Array, "L HD"]) -> Llama:
    """A copy of the model with scaled outputs of the attention: each row of its output weights [H D, E] is multiplied.

    Computed in the wider precision of both and rounded to the weights' dtype, so scales of 1 change no bit.
    """
    output: Any = model.layers.output
    if isinstance(output, Packed):
        return with_weights(model, output=output.with_gains(inputs=scales))
    weights = output[...]
    wide = np.promote_types(weights.dtype, scales.dtype)
    return with_weights(model, output=(weights.astype(wide) * scales[:, :, None].astype(wide)).astype(weights.dtype))


def with_weights(model: Llama, **weights: Array | Packed) -> Llama:
    """A copy of the model with the named layer tensors replaced."""
    changed = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    for name, value in weights.items():
        setattr(changed.layers, name, value if isinstance(value, Packed) else nnx.Param(value))
    return changed


def with_full_weights(model: Llama) -> Llama:
    """A copy of the model with packed matrices unpacked to its dtype; without packed ones, the same arrays."""
    packed = {name: leaf for name in PROJECTIONS if isinstance(leaf := getattr(model.layers, name), Packed)}
    return with_weights(model, **_unpack(packed, model.embed[...].dtype))


@partial(jax.jit, static_argnames="dtype")
def _unpack(packed: dict[str, Packed], dtype: jnp.dtype) -> dict[str, Array]:
    return {name: dense(weights, dtype) for name, weights in packed.items()}


def with_eight_bits(model: Llama, kind: EightBits, projections: Sequence[str] = PROJECTIONS) -> Llama:
    """A copy of the model with the weights of its layers in 8 bits, for products in 8 bits (`eight_bits.py`).

    These weights need half the memory of 16-bit ones, beside the model's own. There are no gradients. Of PROJECTIONS, only
    `projections` are in 8 bits.
    """
    changed = jax.tree.map(lambda leaf: leaf, model)
    for name in projections:
        setattr(changed.layers, name, EightBitWeights(*stacked(getattr(model.layers, name), kind, model.embed[...].dtype)))
    return changed


def over_tables(run: Callable[..., Any], tables: RopeTable, *more: Any) -> Any:
    """`run(table, *more)` for each of a method's tables. Results and `more` have the tables as their first axis, n."""
    if len(tables.inv_freq) > 1:
        return jax.vmap(run)(tables, *more)
    first = jax.tree.map(lambda leaf: leaf[0], (tables, *more))  # the program of a plain model, without a vmapped axis
    return jax.tree.map(lambda leaf: leaf[None], run(*first))


def method_logits(model: Llama, hidden: Float[Array, "n *any E"], method: Method) -> Float[Array, "*any V"]:
    """The logits of a method's passes, merged into one."""
    logits = output_logits(model, hidden)
    return logits[0] if method.merge is None else method.merge(logits)


def check_ids(
    model: Llama, sequences: Sequence[Sequence[int]] | Int[np.ndarray, "..."], giver: str = "the tokenizer gives"
) -> None:
    """Raise UserError for ids that the model does not have, and for a text without ids; `giver` names their source."""
    # JAX looks up another row for an id that does not exist, without an error.
    rows = model.config.vocab_size
    if not len(sequences) or not all(map(len, sequences)):
        raise UserError("there is a text without tokens, which nothing follows; give each at least one")
    if isinstance(sequences, np.ndarray):
        lowest, highest = int(sequences.min()), int(sequences.max())
    else:
        lowest, highest = min(map(min, sequences)), max(map(max, sequences))
    if lowest < 0 or highest >= rows:
        wrong = lowest if lowest < 0 else highest
        raise UserError(
            f"{giver} the id {wrong}, but the model's embedding has {rows} rows, 0 to {rows - 1}; "
            "is it the tokenizer of this model?"
        )


def rms_norm(x: Float[Array, "*any E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "*any E"]:
    """x / sqrt(mean(x^2) + eps) x weight, with the mean in float32 as in Hugging Face."""
    wide = x.astype(np.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def project(
    x: Float[Array, "*any I"], weights: Weights | EightBitWeights, bias: nnx.Param | None = None
) -> Float[Array, "*any O"]:
    """x times one of a layer's matrices `[I, O]`, plus the bias `[O]` if there is one, in x's dtype.

    All products of a layer with its weights go through this function. The backward pass unpacks packed weights again: only
    their codes are kept for it.
    """

    def product_with(x: Array, weights: Weights) -> Array:
        return matmul(x, dense(weights, x.dtype))

    if isinstance(weights, EightBitWeights):
        product = weights.product(x)
    else:
        product = (jax.checkpoint(product_with) if isinstance(weights, Packed) else product_with)(x, weights)
    return product if bias is None else product + bias[...]


def matmul(x: Float[Array, "*any I"], weights: Float[Array, "I O"]) -> Float[Array, "*any O"]:
    """x @ weights, in x's dtype."""
    return _dot(x, weights, x.dtype)


def _dot(x: Array, weights: Array, dtype: DTypeLike) -> Array:
    # float32 products use float32 on GPUs too, where the default is tf32. 16-bit products are summed in float32 by default.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weights, (((x.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=dtype)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return 0.02 * jax.random.normal(rngs.params(), shape, dtype)
