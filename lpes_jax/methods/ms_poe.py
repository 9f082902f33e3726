"""Ms-PoE (arXiv:2403.04797): every head divides its positions by its own ratio, which is chosen for each prompt.

The original (VITA-Group/Ms-PoE) works as follows in all layers except the first two. The attention of the prompt is computed
once from queries and keys that are not rotated. A head's sensitivity is the fraction of keys to which the last query gives more
than 3 times its mean weight. Heads in order of falling sensitivity get rising ratios, from 1.2 to 1.8, so heads that find their
keys without positions keep the sharpest positions. The ratios then hold for the whole answer.

    paper     the head of rank i (0 is the most sensitive) gets r_min + (r_max - r_min) i / (K - 1), as in the paper
    original  the released code: head h gets ratio number argsort(-sensitivity)[h], the inverse permutation of the rank (its
              issue 8), and i / K in place of i / (K - 1), so that r_max is never reached
    fixed     the released `--head_type normal`: head h gets ratio number K - 1 - h of that table, without statistics

Where we differ:
- Grouped queries. If heads with different ratios share a key, the logits are not a function of m - n. The original allows that.
  We rank the K KV groups by the mean sensitivity of their heads; the queries and the key of a group share one ratio. `original`
  is refused for such models. Without grouped queries K = H, and this is the paper's method.
- We compute only the last query's row, which is all that the statistic reads; the original computes the whole matrix. We
  compute the statistic in float32 (the original rounds the weights to 16 bits), over the prompt only, row by row, and keep
  nothing from one prompt to the next. Equal sensitivities keep the order of the heads.
- The cache contains keys before rotation, as for every replaced attention, and a decode step rotates them again; the original
  caches rotated keys.
- In a text that is scored whole (perplexity) the last token is the last query, so every position depends on the text through
it.

Letters: B batch, T queries, S keys, H heads, K key-value heads, D head dim.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

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

Mode = Literal["paper", "original", "fixed"]
_OUTLIER = 3  # times the mean weight


def ms_poe(mode: Mode = "paper", min_ratio: float = 1.2, max_ratio: float = 1.8, first_layer: int = 2) -> Maker:
    """Ms-PoE with ratios of `min_ratio` to `max_ratio` in the layers from `first_layer` on.

    Raises:
        UserError: The ratios are not positive and rising. From the maker: the mode is not defined for the model.
    """
    if not 0 < min_ratio <= max_ratio < np.inf:
        raise UserError(f"Ms-PoE: ratios must be above 0 and rise, got {min_ratio} to {max_ratio}")

    def make(config: LlamaConfig, length: int) -> Method:
        if mode == "original" and config.num_heads != config.num_kv_heads:
            raise UserError(
                f"Ms-PoE as released is not defined where {config.num_heads} heads share {config.num_kv_heads} keys: a key and "
                "its queries would be scaled differently; use the mode `paper`, which ranks the KV groups"
            )
        return attention_method("Ms-PoE", HeadScaling(mode, min_ratio, max_ratio, first_layer), config, length)

    return make


def choices(tuning: Tuning) -> list[Choice]:
    """The modes that are defined for the model."""
    config = tuning.model.config
    modes: tuple[Mode, ...] = ("paper", "fixed")
    if config.num_heads == config.num_kv_heads:
        modes = ("paper", "original", "fixed")
    return [Choice(mode, ms_poe(mode)) for mode in modes[: tuning.budget]]


@dataclass(frozen=True)
class HeadScaling:
    """Attention with one ratio per KV group. Its state is the ratios, `[B, K]`."""

    mode: Mode
    min_ratio: float
    max_ratio: float
    first_layer: int

    def prefill(
        self,
        layer: Layer,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        lengths: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B K"]]:
        """See `Attention`."""
        ratios = jnp.where(layer.number >= self.first_layer, self._ratios(layer, q, k, lengths), 1)
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        return causal_attention(_rotated(q, layer, ratios, positions), _rotated(k, layer, ratios, positions), v), ratios

    def decode(
        self,
        layer: Layer,
        state: Float[Array, "B K"],
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B S K D"],
        v: Float[Array, "B S K D"],
        positions: Int[Array, "B"],
    ) -> Float[Array, "B 1 H D"]:
        """See `Attention`."""
        entries = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
        q = _rotated(q, layer, state, positions[:, None])
        return cached_attention(q, _rotated(k, layer, state, entries), v, positions + 1)

    def _ratios(
        self, layer: Layer, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], lengths: Int[Array, "B"]
    ) -> Float[Array, "B K"]:
        groups = k.shape[2]
        steps = np.arange(groups) / (max(groups - 1, 1) if self.mode == "paper" else groups)
        table = jnp.asarray(self.min_ratio + (self.max_ratio - self.min_ratio) * steps, layer.inv_freq.dtype)
        if self.mode == "fixed":
            return jnp.broadcast_to(table[::-1], (len(q), groups))
        order = jnp.argsort(-outliers(q, k, lengths), axis=-1, stable=True)  # groups from the most sensitive to the least
        return table[order if self.mode == "original" else jnp.argsort(order, axis=-1)]


def outliers(q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], lengths: Int[Array, "B"]) -> Int[Array, "B K"]:
    """The number of keys to which a prompt's last query gives more than 3 times the mean weight, summed over a group's heads.

    Nothing is rotated. The order of groups equals that of their heads' mean fractions, because all have as many heads and keys.
    """
    last = jnp.take_along_axis(q, (lengths - 1)[:, None, None, None], axis=1)
    last = last.reshape(len(q), k.shape[2], -1, q.shape[-1])
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    wide = np.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bkgd,bskd->bkgs", last, k, precision=precision, preferred_element_type=wide)
    seen = jnp.arange(k.shape[1]) < lengths[:, None]
    logits = jnp.where(seen[:, None, None, :], logits * (q.shape[-1] ** -0.5), -jnp.inf)
    mean = 1 / lengths.astype(wide)[:, None, None, None]  # the weights sum to 1
    return (jax.nn.softmax(logits, axis=-1) > _OUTLIER * mean).sum(axis=(2, 3))


def _rotated(
    x: Float[Array, "B T heads D"], layer: Layer, ratios: Float[Array, "B K"], positions: Int[Array, "B T"]
) -> Float[Array, "B T heads D"]:
    inv_freq = layer.inv_freq * (1 / ratios)[:, :, None]
    cos, sin = jax.vmap(partial(cos_sin, attention_scaling=layer.attention_scaling))(inv_freq, positions=positions)
    return rotate(x, cos, sin)
