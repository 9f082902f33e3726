"""Self-Extend (arXiv:2401.01325): near keys by their exact distance, far ones by the distance of groups of positions.

A query at m meets a key at n

    m - n < w    rotated by m - n, as ever: the neighbours, the query itself among them
    else         by  m // g + w - w // g  -  n // g:  positions in groups of g, shifted so that the two regions meet

and one softmax goes over both. So a text of T tokens needs distances of w + (T - w) / g at most: with the default g = 8 and
w = 1024 a model of 4,096 trained positions reads about 25,000. Up to w tokens, and with g = 1, this is the plain model.

The paper's algorithm and its code (datamllab/LongLM) do the same, the code for one prompt at a time; its eager version shifts by
w - w / g, which is the same where g divides w. Its option to scale queries by the logarithm of the position is left out.

The two regions of a prompt are two causal attentions (the far one is of the queries from w on over the keys w before: causal
again), each with the logarithm of its softmax's denominator, by which they are merged. On GPUs in 16 bits both are cuDNN's. In a
decode step every cached key is rotated once, to where it stands as seen by the query.

Letters: B batch, T queries, S keys, H heads, K key-value heads (G = H / K heads share one), D head dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.methods import Maker
from lpes_jax.models.llama.attention import cached_attention, runs_on_cudnn
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Layer, Method, of_attention
from lpes_jax.rope import cos_sin, rotate

_BLOCK = 128  # queries whose logits are in memory together, outside cuDNN


def self_extend(group: int = 8, window: int = 1024) -> Maker:
    """Self-Extend with positions in groups of `group` beyond the last `window` keys. Raises UserError for less than 1 of either."""
    for name, value in (("group", group), ("window", window)):
        if value < 1:
            raise UserError(f"Self-Extend: {name} must be at least 1, got {value}")

    def make(config: LlamaConfig, longest: int) -> Method:
        return of_attention("Self-Extend", GroupedPositions(group, window), config, longest)

    return make


@dataclass(frozen=True)
class GroupedPositions:
    """Attention over a window of exact distances and grouped ones beyond. It has no state."""

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
        """As `Attention`'s."""
        positions, window = jnp.arange(q.shape[1]), self.window
        near, near_sum = attention_and_log_sum(_at(q, layer, positions), _at(k, layer, positions), v, window)
        if q.shape[1] <= window:
            return near, None
        far_q = _at(q[:, window:], layer, self._grouped(positions[window:]))
        far_k = _at(k[:, :-window], layer, positions[:-window] // self.group)
        far, far_sum = attention_and_log_sum(far_q, far_k, v[:, :-window])
        share = jax.nn.sigmoid(far_sum - near_sum[:, window:])[..., None]
        both = (1 - share) * near[:, window:].astype(share.dtype) + share * far.astype(share.dtype)
        return jnp.concatenate([near[:, :window], both.astype(q.dtype)], axis=1), None

    def decode(
        self,
        layer: Layer,
        state: None,
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B S K D"],
        v: Float[Array, "B S K D"],
        positions: Int[Array, "B"],
    ) -> Float[Array, "B 1 H D"]:
        """As `Attention`'s."""
        here, entries = positions[:, None], jnp.arange(k.shape[1])[None, :]
        far = here - (self._grouped(here) - entries // self.group)
        seen_at = jnp.where(here - entries < self.window, entries, far)
        return cached_attention(_at(q, layer, here), _at(k, layer, seen_at), v, positions + 1)

    def _grouped(self, queries: Int[Array, "*any"]) -> Int[Array, "*any"]:
        return queries // self.group + self.window - self.window // self.group


def attention_and_log_sum(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], window: int | None = None
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """`causal_attention`, and log sum exp(q k^T / sqrt(D)) over the keys that each query sees."""
    batch, length, heads, head_dim = q.shape
    window = length if window is None else min(window, length)
    if runs_on_cudnn(head_dim, q.dtype):
        local = None if window == length else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation="cudnn", return_residual=True
        )
    block = min(_BLOCK, length)
    blocks = -(-length // block)
    wide = np.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    q = jnp.pad(q, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, blocks, block, k.shape[2], -1, head_dim), 1, 0)

    def attend(q_and_start: tuple[Array, Array]) -> tuple[Array, Array]:
        q, start = q_and_start
        logits = jnp.einsum("btkgd,bskd->btkgs", q, k, precision=precision, preferred_element_type=wide) * (head_dim**-0.5)
        queries = jnp.minimum(start + jnp.arange(block), length - 1)  # those of the padding see something too: no NaN
        before = queries[:, None] - jnp.arange(length)[None, :]
        seen = (before >= 0) & (before < window)
        logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - log_sum[..., None]).astype(q.dtype)
        out = jnp.einsum("btkgs,bskd->btkgd", weights, v, precision=precision, preferred_element_type=wide)
        return out.astype(q.dtype), log_sum

    out, log_sum = jax.lax.map(attend, (q, jnp.arange(blocks) * block))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, head_dim)[:, :length]
    return out, jnp.moveaxis(log_sum, 0, 1).reshape(batch, -1, heads)[:, :length]


def _at(x: Float[Array, "B T heads D"], layer: Layer, positions: Int[Array, "*rows T"]) -> Float[Array, "B T heads D"]:
    return rotate(x, *cos_sin(layer.inv_freq, layer.attention_scaling, positions))
