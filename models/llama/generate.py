"""Generation with a KV cache, greedy unless a key is given: one prefill, then one token at a time until every row has stopped.

Prompts are padded on the right; each row goes on at its own length, and its new keys are written over the padding. The cache
holds rotated keys: with tables, a key's rotation never changes.

Letters: B batch, T prompt tokens, N new tokens, S = T + N cache entries, L layers, K key-value heads, D head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.models.llama.attention import cached_attention
from lpes_jax.models.llama.model import Layers, Llama, decoder_layer, output_logits, prefill, rms_norm
from lpes_jax.rope import RopeTable


@partial(jax.jit, static_argnames="max_new_tokens")
def greedy(
    model: Llama,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    table: RopeTable,
    stop: Int[Array, "stops"],
    max_new_tokens: int,
    key: jax.Array | None = None,
) -> Int[Array, "B N"]:
    """The argmax continuation of each prompt; what follows the first id of `stop` in a row is filled with that id.

    With a `key`, tokens are drawn from the model's distribution instead (temperature 1).
    """
    batch, length = tokens.shape
    hidden, (keys, values) = prefill(model, tokens, table)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    room = [(0, 0), (0, 0), (0, max_new_tokens), (0, 0), (0, 0)]
    keys, values = jnp.pad(keys, room), jnp.pad(values, room)
    first = _chosen(output_logits(model, last)[:, 0], key, 0).astype(tokens.dtype)
    new = jnp.zeros((batch, max_new_tokens), tokens.dtype).at[:, 0].set(first)
    windows = jnp.asarray(model.config.windows(length + max_new_tokens))
    rows = jnp.arange(batch)

    def stopped(token: Int[Array, "B"]) -> Bool[Array, "B"]:
        return (token[:, None] == stop[None, :]).any(axis=-1)

    def going_on(state: tuple) -> Bool[Array, ""]:
        step, _, done, _, _ = state
        return (step < max_new_tokens) & ~done.all()

    def one_token(state: tuple) -> tuple:
        step, new, done, keys, values = state
        token = new[:, step - 1]
        at = lengths + step - 1  # the position of `token`, a row its own

        def layer(x: Array, inputs: tuple[Layers, Array, Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            layer, inv_freq, window, layer_keys, layer_values = inputs
            cache = {}

            def attend(q: Array, k: Array, v: Array) -> Array:
                cache["keys"] = layer_keys.at[rows, at].set(k[:, 0])
                cache["values"] = layer_values.at[rows, at].set(v[:, 0])
                return cached_attention(q, cache["keys"], cache["values"], at + 1, window)

            x, _ = decoder_layer(model.config, layer, inv_freq, table.attention_scaling, x, at[:, None], attend)
            return x, (cache["keys"], cache["values"])

        x = model.embed[...][token][:, None]
        x, (keys, values) = jax.lax.scan(layer, x, (model.layers, table.inv_freq, windows, keys, values))
        x = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
        following = _chosen(output_logits(model, x)[:, 0], key, step).astype(tokens.dtype)
        following = jnp.where(done, token, following)
        return step + 1, new.at[:, step].set(following), done | stopped(following), keys, values

    state = (jnp.int32(1), new, stopped(first), keys, values)
    steps, new, _, _, _ = jax.lax.while_loop(going_on, one_token, state)
    after = jnp.arange(max_new_tokens)[None, :] >= steps  # never computed: every row had stopped
    return jnp.where(after, jnp.take(new, steps - 1, axis=1)[:, None], new)


def _chosen(logits: Float[Array, "B V"], key: jax.Array | None, step: Int[Array, ""] | int) -> Int[Array, "B"]:
    if key is None:
        return jnp.argmax(logits, axis=-1)
    return jax.random.categorical(jax.random.fold_in(key, step), logits, axis=-1)
