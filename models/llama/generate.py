"""Generation with a KV cache, greedy unless a key is given: one prefill, then one token at a time until every row has stopped.

Prompts are padded on the right. Each row continues at its own length, and its new keys overwrite the padding. The cache has
rotated keys: with tables, a key's rotation never changes. A method with several tables has one cache per table; the tokens are
shared.

Letters: B batch, T prompt tokens, N new tokens, S = T + N cache entries, n tables, L layers, K key-value heads, D head dim.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, mesh_of, over_population, put
from lpes_jax.models.llama.attention import cached_attention
from lpes_jax.models.llama.method import Method, Replacement
from lpes_jax.models.llama.model import (
    LayerContext,
    Llama,
    layer_rows,
    method_logits,
    method_model,
    over_tables,
    prefill,
    rotated,
    run_layers,
)
from lpes_jax.rope import RopeTable, apply_gains


class Continuation(NamedTuple):
    """New tokens of each prompt, and whether all logits of chosen tokens were finite."""

    tokens: Int[Array, "B N"]
    finite: Bool[Array, "B"]


def greedy(
    model: Llama,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    method: Method,
    stop: Int[Array, "stops"],
    max_new_tokens: int,
    key: jax.Array | None = None,
) -> Int[Array, "B N"]:
    """The tokens of `continuation`."""
    return continuation(model, tokens, lengths, method, stop, max_new_tokens, key).tokens


def continuation(
    model: Llama,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    method: Method,
    stop: Int[Array, "stops"],
    max_new_tokens: int,
    key: jax.Array | None = None,
) -> Continuation:
    """The greedy continuation of each prompt. After the first id of `stop`, a row is filled with that id.

    On a mesh, rows are distributed over the population axis if they divide evenly, and so is the result. With a `key` they are
    not, because a key covers all rows.

    Args:
        model: The model.
        tokens: The prompts' ids, padded on the right.
        lengths: The prompts' lengths.
        method: The method to use, made for T + N tokens.
        stop: Ids that end a text.
        max_new_tokens: N.
        key: Samples tokens from the model's distribution instead (temperature 1).
    """
    mesh = mesh_of(model)
    if mesh is None or mesh.size == 1:
        return _greedy(model, tokens, lengths, method, stop, max_new_tokens, key)
    spread = key is None and len(tokens) % mesh.shape["population"] == 0
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (BY_POPULATION if spread else EVERYWHERE, EVERYWHERE))
    stop = stop if len(stop) else jnp.full(1, -1, jnp.int32)  # not a token: XLA of jax 0.11 crashes on an empty array here
    inputs = put(tokens, rows), put(lengths, rows), put(method, everywhere), put(stop, everywhere)
    return _greedy_on_mesh(model, *inputs, max_new_tokens, key, mesh, rows.spec)


@partial(jax.jit, static_argnames=("max_new_tokens", "mesh", "rows"))
def _greedy_on_mesh(
    model: Llama,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    method: Method,
    stop: Int[Array, "stops"],
    max_new_tokens: int,
    key: jax.Array | None,
    mesh: Mesh,
    rows: PartitionSpec,
) -> Continuation:
    def shard(model: Llama, tokens: Array, lengths: Array, method: Method, stop: Array, key: jax.Array | None) -> Continuation:
        return _greedy(model, tokens, lengths, method, stop, max_new_tokens, key)

    specs = EVERYWHERE, rows, rows, EVERYWHERE, EVERYWHERE, EVERYWHERE
    return over_population(shard, mesh, specs, rows)(model, tokens, lengths, method, stop, key)


@partial(jax.jit, static_argnames="max_new_tokens")
def _greedy(
    model: Llama,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    method: Method,
    stop: Int[Array, "stops"],
    max_new_tokens: int,
    key: jax.Array | None = None,
) -> Continuation:
    batch, length = tokens.shape
    model = method_model(model, method)
    begin = partial(_prefill, model, tokens, lengths, method.replacement)
    last, keys, values, known = over_tables(begin, method.tables)
    room = [(0, 0), (0, 0), (0, 0), (0, max_new_tokens), (0, 0), (0, 0)]
    keys, values = jnp.pad(keys, room), jnp.pad(values, room)
    first, finite = _chosen(method_logits(model, last, method)[:, 0], key, 0)
    first = first.astype(tokens.dtype)
    new = jnp.zeros((batch, max_new_tokens), tokens.dtype).at[:, 0].set(first)
    windows = jnp.asarray(model.config.windows(length + max_new_tokens))

    def stopped(token: Int[Array, "B"]) -> Bool[Array, "B"]:
        return (token[:, None] == stop[None, :]).any(axis=-1)

    def unfinished(state: tuple) -> Bool[Array, ""]:
        step, _, done, _, _, _ = state
        return (step < max_new_tokens) & ~done.all()

    def one_token(state: tuple) -> tuple:
        step, new, done, finite, keys, values = state
        token = new[:, step - 1]
        positions = lengths + step - 1  # the position of `token` in each row
        decode = partial(_decode, model, token, positions, windows, method.replacement)
        hidden, keys, values = over_tables(decode, method.tables, keys, values, known)
        following, is_finite = _chosen(method_logits(model, hidden, method)[:, 0], key, step)
        following = jnp.where(done, token, following.astype(tokens.dtype))
        return step + 1, new.at[:, step].set(following), done | stopped(following), finite & (done | is_finite), keys, values

    state = (jnp.int32(1), new, stopped(first), finite, keys, values)
    steps, new, _, finite, _, _ = jax.lax.while_loop(unfinished, one_token, state)
    after = jnp.arange(max_new_tokens)[None, :] >= steps  # not computed, because every row had stopped
    return Continuation(jnp.where(after, jnp.take(new, steps - 1, axis=1)[:, None], new), finite)


def _prefill(
    model: Llama, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], replacement: Replacement | None, table: RopeTable
) -> tuple[Float[Array, "B 1 E"], Array, Array, Any]:
    """The last hidden state of each prompt, its keys and values `[L, B, T, K, D]`, and the state of a replacement."""
    hidden, (keys, values), known = prefill(model, tokens, table, replacement, lengths)
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1), keys, values, known


def _decode(
    model: Llama,
    token: Int[Array, "B"],
    positions: Int[Array, "B"],
    windows: Int[Array, "L"],
    replacement: Replacement | None,
    table: RopeTable,
    keys: Float[Array, "L B S K D"],
    values: Float[Array, "L B S K D"],
    known: Any,
) -> tuple[Float[Array, "B 1 E"], Array, Array]:
    """The hidden state of one new token per row, and the cache with its keys and values."""
    batch, attention = jnp.arange(len(token)), None if replacement is None else replacement.attention

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, tuple[Array, Array]]:
        row, (window, layer_keys, layer_values, state) = context.row, context.own
        if context.scaled is not None:
            q, k = context.scaled()
        if attention is None:
            q, k = rotated(q, k, row, positions[:, None])
        cache = layer_keys.at[batch, positions].set(k[:, 0]), layer_values.at[batch, positions].set(v[:, 0])
        if attention is not None:
            return attention.decode(row, state, apply_gains(q, row.gains), *cache, positions), cache
        return cached_attention(q, *cache, positions + 1, window), cache

    x, rows = model.embed[...][token][:, None], layer_rows(model.config, table, replacement)
    x, (keys, values) = run_layers(model, x, rows, attend, (windows, keys, values, known), keep=lambda x, kept: kept)
    return x, keys, values


def _chosen(
    logits: Float[Array, "B V"], key: jax.Array | None, step: Int[Array, ""] | int
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """The next token of each row, and whether its logit is finite. A NaN or inf among the logits is always the one chosen."""
    if key is None:
        chosen = jnp.argmax(logits, axis=-1)
    else:
        chosen = jax.random.categorical(jax.random.fold_in(key, step), logits, axis=-1)
    return chosen, jnp.isfinite(jnp.take_along_axis(logits, chosen[:, None], axis=-1)[:, 0])
