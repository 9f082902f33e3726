"""ZeroTuning (Han et al., arXiv 2505.11739; code in FeijiangHan/ZeroTuning): the weight of the first token is scaled.

A prompt's first token (BOS, or whatever is first) takes a large share of the attention of most heads. If a head's weights are
a_0 ... a_t, the method multiplies that of the first token by gamma and normalises again:

    a_0' = gamma a_0 / D    a_i' = a_i / D    D = (gamma - 1) a_0 + 1

This is a bias of ln gamma on the logit of the first token, for every query. With gamma < 1 all other tokens get more weight, in
unchanged proportions. Only some heads are scaled: those that gain by a larger weight of the first token (up-effective), or
those that gain by a smaller one (down-effective), whichever are more; of these the strongest, 40 % of the heads by default. The
released code scales the head of one number in all layers, tries heads one by one, and chooses gamma by accuracy on labelled
questions.

What was read: the abstract of versions 2 and 3, two summaries of the method, and the released attention and evaluation code
(Llama, transformers 4.53). The text of the paper's sections was not available to us.

    make = zero_tuning(0.6, heads=[0, 3, 4])

Where we differ:
- The weights are never written down. With o the plain output of a head, v_0 the first token's value and c the share of all
  other tokens, the new output is o + (1 / D - 1) (o - v_0), D = gamma + (1 - gamma) c. c is the output of a second attention,
  whose values are 0 for the first token and 1 for the others. So the model's kernels are used, attention costs twice as much,
  and everything else as much as in the plain model. A gamma of 1 changes no bit.
- Queries and keys are rotated as in the model. The paper also has a version for kernels that hide their weights, which scales
  queries or keys; that is another function, because a logit is then multiplied. We do not have it.
- `choices` profiles heads within the budget: neighbouring heads share a trial if there are more than budget / 2. Their effect
  is measured with gamma = 1.5 against the plain model, by accuracy and then by likelihood; heads that lose by it count as
  down-effective. The code does not fix these. The remaining trials are values of gamma from 1 to 4, or to 1/4. With a budget
  below 8, all heads are scaled without a profile.
- The unsupervised version, which chooses gamma by the entropy of the output, is not included.

Letters: B batch, T queries, S keys, H heads, K key-value heads, D head dim, L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.attention import cached_attention, causal_attention
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Layer, Method, attention_method, table_method
from lpes_jax.rope import cos_sin, rotate

_PROFILE = 1.5  # gamma of the profile
_SHARE = 0.4  # of the heads are scaled
_STRONGEST = 4.0  # gamma is tried from 1 to this, or to its inverse
_LEAST_BUDGET = 8  # for a profile


def zero_tuning(gamma: float, heads: Sequence[int] | None = None, layers: Sequence[int] | None = None) -> Maker:
    """Scale the first token's weight by `gamma`. A gamma of 1 is the plain model, bit for bit.

    Args:
        gamma: The multiplier, before the weights are normalised again.
        heads: The query heads that are scaled; None means all.
        layers: The layers in which they are scaled; None means all.

    Raises:
        UserError: Gamma is not a positive number. From the maker: the model lacks a head or a layer.
    """
    if not 0 < gamma < math.inf:
        raise UserError(f"ZeroTuning: gamma must be a number above 0, got {gamma}")

    def make(config: LlamaConfig, length: int) -> Method:
        for what, given, count in (("heads", heads, config.num_heads), ("layers", layers, config.num_layers)):
            if given is not None and (not given or not 0 <= min(given) <= max(given) < count):
                raise UserError(f"ZeroTuning: the model's {what} are 0 to {count - 1}, got {list(given)!r:.60}")
        if gamma == 1:
            return table_method(config.rope_table(length))
        gammas = np.ones((config.num_layers, config.num_heads), np.float32)
        rows = range(config.num_layers) if layers is None else layers
        gammas[np.ix_(rows, range(config.num_heads) if heads is None else heads)] = gamma
        return attention_method("ZeroTuning", ScaledFirstToken(), config, length, jnp.asarray(gammas))

    return make


def choices(tuning: Tuning) -> list[Choice]:
    """Values of gamma: for the heads that a profile finds, or for all heads if the budget allows no profile."""
    profile = _profile(tuning) if tuning.budget >= _LEAST_BUDGET else None
    if profile is None:
        down = tuning.budget - tuning.budget // 2
        return [_choice(gamma) for gamma in (*_gammas(1 / _STRONGEST, down), *_gammas(_STRONGEST, tuning.budget - down))]
    heads, strongest, left = profile
    return [_choice(gamma, heads) for gamma in _gammas(strongest, left)]


def _profile(tuning: Tuning) -> tuple[list[int], float, int] | None:
    """The heads to scale, the end of gamma's range, and the rest of the budget. None without scores, or without an effect."""
    num_heads = tuning.model.config.num_heads
    groups = [group.tolist() for group in np.array_split(np.arange(num_heads), min(num_heads, tuning.budget // 2))]
    if (plain := tuning.score(zero_tuning(1.0))) is None:
        return None
    effects = [(tuning.score(zero_tuning(_PROFILE, group)) or plain, group) for group in groups]
    up = sorted((entry for entry in effects if entry[0] > plain), reverse=True)
    down = sorted(entry for entry in effects if entry[0] < plain)
    sizes = [sum(len(group) for _, group in kind) for kind in (up, down)]
    chosen: list[int] = []
    for _, group in up if sizes[0] >= sizes[1] else down:
        if len(chosen) < _SHARE * num_heads:
            chosen += group
    if not chosen:
        return None
    return sorted(chosen), _STRONGEST if sizes[0] >= sizes[1] else 1 / _STRONGEST, tuning.budget - 1 - len(groups)


def _gammas(strongest: float, count: int) -> list[float]:
    """`count` values from 1 (not included) to `strongest`, evenly spaced by their logarithms."""
    return np.geomspace(1, strongest, count + 1)[1:].round(4).tolist()


def _choice(gamma: float, heads: list[int] | None = None) -> Choice:
    which = "all heads" if heads is None else f"heads {' '.join(map(str, heads))}"
    return Choice(f"gamma {gamma:g}, {which}", zero_tuning(gamma, heads))


@dataclass(frozen=True)
class ScaledFirstToken:
    """Attention with the first token's weight scaled. It has no state. `layer.parameters`: gamma of each head, `[H]`."""

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
        q, k = _rotated(q, layer, positions), _rotated(k, layer, positions)
        return reweighted(layer.parameters, causal_attention(q, k, v), causal_attention(q, k, _others(v)), v[:, :1]), None

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
        q, k = _rotated(q, layer, positions[:, None]), _rotated(k, layer, jnp.arange(k.shape[1]))
        out, others = (cached_attention(q, k, values, positions + 1) for values in (v, _others(v)))
        return reweighted(layer.parameters, out, others, v[:, :1])


def reweighted(
    gammas: Float[Array, "H"],
    out: Float[Array, "B T H D"],
    others: Float[Array, "B T H D"],
    first: Float[Array, "B 1 K D"],
) -> Float[Array, "B T H D"]:
    """The outputs after the first token's weight was scaled: o + (1 / D - 1) (o - v_0), D = gamma + (1 - gamma) c.

    Args:
        gammas: Gamma of each head.
        out: o, the plain outputs.
        others: c, the share of all tokens but the first.
        first: v_0, the first token's value.
    """
    wide = np.promote_types(out.dtype, jnp.float32)
    gammas = gammas.astype(wide)[:, None]
    stretch = 1 / (gammas + (1 - gammas) * others.astype(wide)) - 1
    first = jnp.repeat(first, out.shape[2] // first.shape[2], axis=2).astype(wide)
    return (out.astype(wide) + stretch * (out.astype(wide) - first)).astype(out.dtype)


def _others(v: Float[Array, "B S K D"]) -> Float[Array, "B S K D"]:
    """Values that an attention turns into the share of all tokens but the first."""
    return jnp.broadcast_to((jnp.arange(v.shape[1]) > 0)[:, None, None], v.shape).astype(v.dtype)


def _rotated(x: Float[Array, "B T heads D"], layer: Layer, positions: Int[Array, "*rows T"]) -> Float[Array, "B T heads D"]:
    return rotate(x, *cos_sin(layer.inv_freq, layer.attention_scaling, positions))
