"""The Llama decoder in Flax NNX: stacked layers, scanned together with the rows of a RoPE table.

One model for all families of `config.py`: biases, norms of queries and keys, and windows are there where the config says so.

The module is a pytree (NNX tree mode): hand it to `jax.jit`, `jax.vmap` and `jax.grad` as an argument, and never close over it,
or its weights become constants of the program. It knows nothing of positions: every call takes a `RopeTable`.

`run_layers` is the one forward pass. What attends in it is an argument: `hidden_states` and `prefill` give it causal attention
over prompts, or a method's (`method.py`), `prefix.py` attention over shared prefixes, `generate.py` attention over a cache.

Letters: B batch, T tokens, S or M tokens that are read, A answer tokens, L layers, H heads, K key-value heads, D head dim,
E embedding, F feed-forward, V vocabulary, G = 1 or K.
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
from lpes_jax.models.llama.method import Channel, Layer, Method, Replacement
from lpes_jax.rope import RopeTable, apply_gains, cos_sin, rotate

KeyValues = tuple[Float[Array, "*layers B T K D"], Float[Array, "*layers B T K D"]]
Scaled = Callable[[], tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]]
_SHORT = 256  # tokens of a row, below which a last layer of its own does not win back what it takes to compile
_ROWS_AT_ONCE = 32  # queries whose logits over all keys are in memory together, where a channel is scaled


class Layers(nnx.Module):
    """The weights of all decoder layers, stacked on a leading layer axis and stored as [in, out]."""

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

        def bias(there: bool, size: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros((c.num_layers, size), dtype)) if there else None

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
    """A Llama-architecture language model. `head` is None where the embedding is tied to the output."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.embed = nnx.Param(_normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.layers = Layers(config, rngs=rngs, dtype=dtype)
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        tied = config.tie_word_embeddings
        self.head = None if tied else nnx.Param(_normal(rngs, (config.hidden_size, config.vocab_size), dtype))


class LayerContext(NamedTuple):
    """What an attention is told beside queries, keys and values.

    `row`: of the layer, its row of the RoPE table and the method's parameters; `own`: the layer's part of what the pass has of
    each (its window, its cache); `read`: the tokens that have queries (None: all); `scaled`: gives the queries and keys of
    hidden states whose channel is scaled, where the method does that.
    """

    row: Layer
    own: Any
    read: Int[Array, "B S"] | None
    scaled: Scaled | None


# (q [B, S, H, D], k and v [B, T, K, D], none rotated, context) -> the attention's output [B, S, H, D], and what `keep` is given
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
    """The forward pass: all layers, with `attend` in each, and the last norm. All functions that run the model call it.

    Args:
        x: the embedded tokens.
        rows: what each layer is told (`layer_rows`), every leaf `[L, ...]`.
        attend: rotates and attends; it alone knows of positions, caches, shared prefixes and methods.
        own: what the pass has of each layer, every leaf `[L, ...]`.
        read: indices of the tokens whose states are wanted (None: all). The last layer then has queries of these alone, as
            nothing else needs them; it is compiled beside the others, but not for short rows or gradients. Not with `keep`.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        keep: what is kept of a layer, from the hidden states after it and what `attend` gave beside its output.

    Returns:
        The normalised last hidden states (S = M with `read`, else T), and what `keep` gave, stacked `[L, ...]`.
    """
    config = model.config

    def layer(x: Array, inputs: tuple[Layers, Layer, Any], read: Array | None = None) -> tuple[Array, Any]:
        weights, row, layer_own = inputs

        def attend_here(q: Array, k: Array, v: Array, scaled: Scaled | None = None) -> tuple[Array, Any]:
            return attend(q, k, v, LayerContext(row, layer_own, read, scaled))

        x, kept = decoder_layer(config, weights, x, attend_here, read, channel_of(row))
        return x, keep(x, kept)

    inputs = model.layers, rows, own
    if read is None or remat or x.shape[1] < _SHORT:  # gradients of the weights come stacked, as the weights are
        x, kept = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, inputs)
        x = x if read is None else jnp.take_along_axis(x, read[:, :, None], axis=1)
    else:

        def layer_inputs(number: Int[Array, ""] | int) -> Any:  # stacks without their last layer would be copies
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
    behind: int | None = None,
) -> Float[Array, "B T E"]:
    """The normalised last hidden states. Rows may be padded on the right: no real token sees the padding.

    `remat` recomputes each layer in the backward pass instead of keeping its activations. `replacement` attends in place of the
    model's own attention, and is told the prompts' `lengths` (None: all of T). At most `behind` tokens behind a prompt count.
    """
    return _run_prompts(model, tokens, table, replacement, lengths, behind, remat=remat)[0]


def prefill(
    model: Llama,
    tokens: Int[Array, "B T"],
    table: RopeTable,
    replacement: Replacement | None = None,
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T E"], KeyValues, Any]:
    """`hidden_states`, the keys and values of every layer, `[L, B, T, K, D]` each, and the state of a replacement `[L, ...]`.

    Keys are rotated, but with another attention as they are before. Nothing is read behind the prompts.
    """
    x, (cache, state) = _run_prompts(model, tokens, table, replacement, lengths, behind=0, keep=lambda x, kept: kept)
    return x, cache, state


def states_after_layers(
    model: Llama, tokens: Int[Array, "B T"], table: RopeTable, of_layer: Callable[[Float[Array, "B T E"]], Any]
) -> tuple[Float[Array, "B T E"], Any]:
    """`hidden_states`, and `of_layer` of the states after each layer, before the last norm; `[L, ...]`."""
    return _run_prompts(model, tokens, table, keep=lambda x, kept: of_layer(x))


def _run_prompts(
    model: Llama,
    tokens: Int[Array, "B T"],
    table: RopeTable,
    replacement: Replacement | None = None,
    lengths: Int[Array, "B"] | None = None,
    behind: int | None = None,
    **how: Any,
) -> tuple[Float[Array, "B T E"], Any]:
    """`run_layers` over prompts that are padded on the right; what `attend` gives is ((k, v), state of a replacement)."""
    config, length = model.config, tokens.shape[1]
    positions = jnp.arange(length)
    known = jnp.full(len(tokens), length, jnp.int32) if lengths is None else lengths
    last_rows = 1 if lengths is None else length if behind is None else behind + 1

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, tuple[KeyValues, Any]]:
        row = context.row
        if replacement is not None and replacement.attention is not None:
            out, state = replacement.attention.prefill(row, apply_gains(q, row.gains), k, v, known)
            return out, ((k, v), state)
        q, k = rotated(q, k, row, positions)
        out = within_window(config, length, context.own, _causal, q, k, v)
        if context.scaled is not None:
            window = jnp.where(context.own, config.sliding_window or length, length)
            again = partial(_last_rows_scaled, out, context.scaled, v, row, known - 1, last_rows, window)
            out, k = jax.lax.cond(row.parameters.factor != 1, again, lambda: (out, k))
        return out, ((k, v), None)

    rows, own = layer_rows(config, table, replacement), slides(config, length)
    return run_layers(model, model.embed[...][tokens], rows, attend, own, **how)


def slides(config: LlamaConfig, length: int) -> Bool[Array, "L"]:
    """Whether a layer's window is shorter than rows of `length` tokens: what `within_window` is told of each."""
    return jnp.asarray(config.windows(length) < length)


def within_window(
    config: LlamaConfig,
    length: int,
    slides: Bool[Array, ""],
    attention: Callable[[int | None], Callable[..., Array]],
    *operands: Array,
) -> Array:
    """`attention(window)` of the operands, with the layer's window; no branch is compiled where all layers have the same."""
    of_layers = config.windows(length) < length
    if of_layers.all() or not of_layers.any():
        return attention(config.sliding_window if of_layers.all() else None)(*operands)
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
    """`out` with `count` rows from `last` on as the scaled queries and keys give them; and these keys, rotated."""
    q, k = rotated(*scaled(), row, jnp.arange(out.shape[1]))
    positions = last[:, None] + jnp.arange(min(count, out.shape[1]))

    def attend(q_and_position: tuple[Array, Array]) -> Array:
        q, position = q_and_position
        return cached_attention(q[:, None], k, v, position + 1, window)[:, 0]

    q = jnp.take_along_axis(q, positions[:, :, None, None], axis=1, mode="clip")
    rows_at_once = min(_ROWS_AT_ONCE, positions.shape[1])
    again = jax.lax.map(attend, (q.swapaxes(0, 1), positions.T), batch_size=rows_at_once).swapaxes(0, 1)
    return out.at[jnp.arange(len(out))[:, None], positions].set(again, mode="drop"), k


def channel_of(row: Layer) -> Channel | None:
    """The channel that the layer's queries and keys see scaled, where the method is that."""
    return row.parameters if isinstance(row.parameters, Channel) else None


def layer_rows(config: LlamaConfig, table: RopeTable, replacement: Replacement | None = None) -> Layer:
    """What each layer is told, stacked for a scan."""
    parameters = None if replacement is None else replacement.parameters
    return Layer(jnp.arange(config.num_layers), table.inv_freq, table.layer_scaling, table.gains, parameters)


def rotated(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], row: Layer, positions: Int[Array, "*batch T"]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
    """Queries and keys at the same positions, rotated by the layer's row of the table, the queries with its gains."""
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
    """One layer; `attend(q, k, v)` rotates and attends. Returns the new x, and what else `attend` returned.

    `read`: the tokens that the new x is wanted of, and that have queries (None: all T); keys and values are of all.
    `channel` (not with `read`): `attend` gets a fourth argument, a function of the q and k of hidden states so scaled.
    """
    batch, length, _ = x.shape
    h = rms_norm(x, layer.attention_norm[...], config.rms_norm_eps)
    k = matmul(h, layer.key[...], layer.key_bias).reshape(batch, length, config.num_kv_heads, config.head_dim)
    v = matmul(h, layer.value[...], layer.value_bias).reshape(batch, length, config.num_kv_heads, config.head_dim)
    if read is not None:
        x, h = (jnp.take_along_axis(array, read[:, :, None], axis=1) for array in (x, h))
        length = read.shape[1]
    q = matmul(h, layer.query[...], layer.query_bias).reshape(batch, length, config.num_heads, config.head_dim)

    def normed(q: Array, k: Array) -> tuple[Array, Array]:
        if layer.query_norm is None or layer.key_norm is None:
            return q, k
        return rms_norm(q, layer.query_norm[...], config.rms_norm_eps), rms_norm(k, layer.key_norm[...], config.rms_norm_eps)

    def scaled(channel: Channel) -> tuple[Array, Array]:  # the channel's rows of the weights, so much more of them
        wide = np.promote_types(x.dtype, jnp.float32)
        more = h[:, :, channel.number, None].astype(wide) * (channel.factor.astype(wide) - 1)
        rows = (weights[...][channel.number].astype(wide) for weights in (layer.query, layer.key))
        return normed(*(p + (more * row).reshape(p.shape).astype(p.dtype) for p, row in zip((q, k), rows, strict=True)))

    attended, kept = attend(*normed(q, k), v, *(() if channel is None else (partial(scaled, channel),)))
    x = x + matmul(attended.reshape(batch, length, -1), layer.output[...], layer.output_bias)
    h = rms_norm(x, layer.mlp_norm[...], config.rms_norm_eps)
    gated = jax.nn.silu(matmul(h, layer.gate[...], layer.gate_bias)) * matmul(h, layer.up[...], layer.up_bias)
    x = x + matmul(gated, layer.down[...], layer.down_bias)
    return x, kept


def output_logits(model: Llama, hidden: Float[Array, "*any E"]) -> Float[Array, "*any V"]:
    """float32 logits (float64 for a float64 model) of hidden states: call it on the positions that are read, not on all."""
    weights = model.embed[...].T if model.head is None else model.head[...]
    return _dot(hidden, weights, np.promote_types(hidden.dtype, jnp.float32))


def over_tables(run: Callable[..., Any], tables: RopeTable, *more: Any) -> Any:
    """`run(table, *more)` for each of a method's tables; results, and what stands in `more`, have the tables' axis in front."""
    if len(tables.inv_freq) > 1:
        return jax.vmap(run)(tables, *more)
    first = jax.tree.map(lambda leaf: leaf[0], (tables, *more))  # the program of a plain model, with no axis more
    return jax.tree.map(lambda leaf: leaf[None], run(*first))


def method_logits(model: Llama, hidden: Float[Array, "n *any E"], method: Method) -> Float[Array, "*any V"]:
    """The logits of a method's passes as one."""
    logits = output_logits(model, hidden)
    return logits[0] if method.merge is None else method.merge(logits)


def check_ids(
    model: Llama, sequences: Sequence[Sequence[int]] | Int[np.ndarray, "..."], giver: str = "the tokenizer gives"
) -> None:
    """Raise UserError for ids that the model does not have, and for a text without any; `giver` says where they come from."""
    # Looking up a row that is not there gives another one, without an error.
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
    """x / sqrt(mean(x^2) + eps) x weight, the mean in float32 as Hugging Face takes it."""
    wide = x.astype(np.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def matmul(x: Float[Array, "*any I"], weights: Float[Array, "I O"], bias: nnx.Param | None = None) -> Float[Array, "*any O"]:
    """x @ weights, plus a bias `[O]` where there is one, in x's dtype."""
    product = _dot(x, weights, x.dtype)
    return product if bias is None else product + bias[...]


def _dot(x: Array, weights: Array, dtype: DTypeLike) -> Array:
    # float32 means float32, also on GPUs, whose default is tf32; 16-bit products sum in float32 as they are.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weights, (((x.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=dtype)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return 0.02 * jax.random.normal(rngs.params(), shape, dtype)
