"""Self-Extend (arXiv:2401.01325): near keys by their exact distance, far ones by the distance of groups of positions.

A query at m meets a key at n

    m - n < w    rotated by m - n, unchanged: the neighbours, including the query itself
    else         by  m // g + w - w // g  -  n // g:  positions in groups of g, shifted so that the two regions meet

and one softmax covers both. A text of T tokens therefore needs distances of w + (T - w) / g at most. With the default g = 8 and
w = 1024, a model of 4,096 trained positions reads about 25,000. Up to w tokens, and with g = 1, this is the plain model.

The paper's algorithm and its code (datamllab/LongLM) do the same, the code for one prompt at a time. Its eager version shifts
by w - w / g, which is the same if g divides w. Its option to scale queries by the logarithm of the position is not implemented.

A prompt of at most w tokens uses the model's own attention. A longer one is processed one block of queries at a time, with the
logits of its near keys and of all far keys side by side. No cuDNN kernel is used, because none supports this. A decode step
rotates every cached key once, by its distance from the query.

Letters: B batch, T queries, S keys, H heads, K key-value heads (G = H / K heads share one), D head dim.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.attention import cached_attention, causal_attention
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Layer, Method, attention_method
from lpes_jax.rope import cos_sin, rotate

_BLOCK = 128  # queries whose logits are in memory at once


def self_extend(group: int = 8, window: int = 1024) -> Maker:
    """Self-Extend with positions in groups of `group` beyond the last `window` keys. Raises UserError if one is below 1."""
    for name, value in (("group", group), ("window", window)):
        if value < 1:
            raise UserError(f"Self-Extend: {name} must be at least 1, got {value}")

    def make(config: LlamaConfig, length: int) -> Method:
        return attention_method("Self-Extend", GroupedPositions(group, window), config, length)

    return make


def choices(tuning: Tuning) -> list[Choice]:
    """Windows from small to large, each with several groups."""
    sizes = [(group, window) for window in (128, 256, 512, 1024) for group in (2, 4, 8)][: tuning.budget]
    return [Choice(f"group {group}, window {window}", self_extend(group, window)) for group, window in sizes]


@dataclass(frozen=True)
class GroupedPositions:
    """Attention with exact distances within a window and grouped distances beyond. It has no state."""

    group: int
    window: int

    def prefill(
        self,
        layer: Layer,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        lengths: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T H D"], None]:
        """See `Attention`."""
        positions = jnp.arange(q.shape[1])
        near_q, near_k = _rotated(q, layer, positions), _rotated(k, layer, positions)
        if q.shape[1] <= self.window:
            return causal_attention(near_q, near_k, v), None
        far_q, far_k = _rotated(q, layer, self._grouped(positions)), _rotated(k, layer, positions // self.group)
        return two_regions(near_q, near_k, far_q, far_k, v, self.window), None

    def decode(
        self,
        layer: Layer,
        state: None,
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B S K D"],
        v: Float[Array, "B S K D"],
        positions: Int[Array, "B"],
    ) -> Float[Array, "B 1 H D"]:
        """See `Attention`."""
        here, entries = positions[:, None], jnp.arange(k.shape[1])[None, :]
        far = here - (self._grouped(here) - entries // self.group)
        seen = jnp.where(here - entries < self.window, entries, far)
        return cached_attention(_rotated(q, layer, here), _rotated(k, layer, seen), v, positions + 1)

    def _grouped(self, queries: Int[Array, "*any"]) -> Int[Array, "*any"]:
        return queries // self.group + self.window - self.window // self.group


def two_regions(
    near_q: Float[Array, "B T H D"],
    near_k: Float[Array, "B T K D"],
    far_q: Float[Array, "B T H D"],
    far_k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    window: int,
) -> Float[Array, "B T H D"]:
    """Causal attention with logits near_q near_k for the last `window` keys of a query, and far_q far_k for those before."""
    batch, length, heads, head_dim = near_q.shape
    block = min(_BLOCK, length)
    rows = block * -(-length // block)
    wide = np.promote_types(v.dtype, jnp.float32)
    einsum = partial(jnp.einsum, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST if v.dtype == wide else None)

    def in_blocks(q: Array) -> Array:
        q = jnp.pad(q, ((0, 0), (0, rows - length), (0, 0), (0, 0)))
        return jnp.moveaxis(q.reshape(batch, -1, block, v.shape[2], heads // v.shape[2], head_dim), 1, 0)

    # Padding before the first key and after the last, so that the near keys of every block are a slice of one size.
    near_k, near_v = (jnp.pad(part, ((0, 0), (window - 1, rows - length), (0, 0), (0, 0))) for part in (near_k, v))

    def attend(inputs: tuple[Array, Array, Array]) -> Array:
        near_q, far_q, start = inputs
        k_here, v_here = (jax.lax.dynamic_slice_in_dim(part, start, window - 1 + block, 1) for part in (near_k, near_v))
        queries = start + jnp.arange(block)[:, None]
        near_keys, far_keys = start - (window - 1) + jnp.arange(window - 1 + block), jnp.arange(length)
        seen = jnp.concatenate(
            [(near_keys >= 0) & (near_keys <= queries) & (near_keys > queries - window), far_keys <= queries - window], axis=1
        )
        logits = jnp.concatenate(
            [einsum("btkgd,bskd->bkgts", near_q, k_here), einsum("btkgd,bskd->bkgts", far_q, far_k)], axis=-1
        )
        weights = jax.nn.softmax(jnp.where(seen, logits * (head_dim**-0.5), -jnp.inf), axis=-1).astype(v.dtype)
        near, far = weights[..., : len(near_keys)], weights[..., len(near_keys) :]
        return (einsum("bkgts,bskd->btkgd", near, v_here) + einsum("bkgts,bskd->btkgd", far, v)).astype(v.dtype)

    out = jax.lax.map(attend, (in_blocks(near_q), in_blocks(far_q), jnp.arange(0, rows, block)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, rows, heads, head_dim)[:, :length]


def _rotated(x: Float[Array, "B T heads D"], layer: Layer, positions: Int[Array, "*rows T"]) -> Float[Array, "B T heads D"]:
    return rotate(x, *cos_sin(layer.inv_freq, layer.attention_scaling, positions))
