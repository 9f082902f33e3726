"""Ms-PoE (arXiv:2403.04797): every head divides its positions by a ratio of its own, chosen anew for each prompt.

What the original (VITA-Group/Ms-PoE) does, in all layers but the first two: the attention of the prompt is computed once from
queries and keys that are not rotated. A head's sensitivity is the fraction of keys to which the last query gives more than
3 times its mean weight. The heads in order of falling sensitivity get rising ratios, from 1.2 to 1.8: what finds its keys
without positions keeps them sharpest. The ratios then hold for the whole answer.

    paper     head of rank i (0 the most sensitive) gets r_min + (r_max - r_min) i / (K - 1): what the paper says
    original  the released code: head h gets ratio number argsort(-sensitivity)[h], the inverse permutation of the rank (its
              issue 8), and i / K in place of i / (K - 1), so that r_max is never reached
    fixed     the released `--head_type normal`: head h gets ratio number K - 1 - h of that table; no statistics

Where we differ:
- Grouped queries. A key that is shared by heads of different ratios leaves no function of m - n. The original does that; we
  rank KV groups, K of them, by the mean sensitivity of their heads, and a group's queries and key have one ratio. `original`
  is refused for such models. Without grouped queries K = H and this is the paper.
- Only the last query's row is computed, which is all that the statistic reads; the original computes the whole matrix. It
  computes the statistic in float32 (the original rounds the weights to 16 bits), over the prompt alone, row by row, and nothing
  is kept from one prompt to the next. Equal sensitivities keep the order of the heads.
- The cache holds keys before rotation, as with every replaced attention, and a decode step rotates them anew; the original
  caches them rotated.
- Text that is scored whole (perplexity) has its last token as the last query, so every position knows the text through it.

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
from lpes_jax.models.llama.method import Layer, Method, of_attention
from lpes_jax.rope import cos_sin, rotate

Mode = Literal["paper", "original", "fixed"]
_OUTLIER = 3  # times the mean weight


def ms_poe(mode: Mode = "paper", min_ratio: float = 1.2, max_ratio: float = 1.8, first_layer: int = 2) -> Maker:
    """Ms-PoE with ratios of `min_ratio` to `max_ratio` in the layers from `first_layer` on.

    Raises UserError for ratios that are not positive and rising; the maker does for models that the mode is not defined for.
    """
    if not 0 < min_ratio <= max_ratio < np.inf:
        raise UserError(f"Ms-PoE: ratios must be above 0 and rise, got {min_ratio} to {max_ratio}")

    def make(config: LlamaConfig, length: int) -> Method:
        if mode == "original" and config.num_heads != config.num_kv_heads:
            raise UserError(
                f"Ms-PoE as released is not defined where {config.num_heads} heads share {config.num_kv_heads} keys: a key and "
                "its queries would be scaled differently; take the mode `paper`, which ranks the KV groups"
            )
        return of_attention("Ms-PoE", HeadScaling(mode, min_ratio, max_ratio, first_layer), config, length)

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
    """Attention with one ratio for each KV group. Its state are the ratios, `[B, K]`."""

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
        """As `Attention`'s."""
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
        """As `Attention`'s."""
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
    """Keys that get more than 3 times the mean weight from a prompt's last query, nothing rotated, over all heads of a group.

    As an order of groups this is the mean of their heads' fractions: all of them have as many heads and keys.
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
