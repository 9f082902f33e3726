"""Attention Buckets (Chen et al., arXiv 2312.04455; code in DAMO-ConvAI/attention-buckets): one pass for each of several bases.

With RoPE, attention rises and falls with distance, in waves that depend on the base. Runs with several bases have their troughs
at different distances. The runs share only the tokens. At each position, run j gives logits z_j and a confidence c_j:

    w = softmax over the runs of c        merged = sum_j w_j z_j

The released code uses the largest raw logit as c (`max_logit`) and mixes logits, in float32; these are the defaults. The paper
describes output distributions weighted by confidence: `max_probability` and `probabilities` (the log of the mixed ones, which
are logits again).

Where we differ:
- All runs are one program with an extra axis, over a batch of prompts.
- Tables are made once and not at each step.
- Every position of a text can be read, not only the last, so that perplexity is defined.
- Bases are relative to the model's own theta by default, because the original's were chosen for a theta of 10000.

Letters: n runs, B batch, A positions that are read, V vocabulary, D head dim, M distances.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import TableMethod

BASES = {
    "rag": (10_000.0, 13_000.0, 16_000.0, 19_000.0, 22_000.0, 25_000.0, 28_000.0),
    "tool": (10_000.0, 17_500.0, 18_000.0, 19_000.0, 20_000.0, 25_000.0),
}
WEIGHTS = ("max_logit", "max_probability")
MIXES = ("logits", "probabilities")


def attention_buckets(
    bases: str | Sequence[float] = "rag", relative: bool = True, weights: str = "max_logit", mix: str = "logits"
) -> Maker:
    """The mixture of the model's outputs under each of `bases`. Memory and time are those of one plain pass per base.

    Args:
        bases: A set of `BASES`, or numbers.
        relative: Whether a base of 10000 means the model's own theta. The model's RoPE type is kept, with another theta.
        weights: The confidence of a run, one of `WEIGHTS`.
        mix: What is mixed, one of `MIXES`.

    Raises:
        UserError: An unknown choice, or a base that is not above 1.
    """
    if isinstance(bases, str) and bases not in BASES:
        raise UserError(f"Attention Buckets: bases {bases!r:.60} is not one of {', '.join(BASES)}, nor a list of numbers")
    numbers = BASES[bases] if isinstance(bases, str) else tuple(bases)
    if not numbers or not all(1 < base < math.inf for base in numbers):
        raise UserError(f"Attention Buckets: bases must be one or more numbers above 1, got {list(numbers)!r:.60}")
    for name, value, admitted in (("weights", weights, WEIGHTS), ("mix", mix, MIXES)):
        if value not in admitted:
            raise UserError(f"Attention Buckets: {name}={value!r:.60} is not one of {', '.join(admitted)}")

    def make(config: LlamaConfig, length: int) -> TableMethod:
        thetas = [base * config.rope.rope_theta / 10_000 if relative else float(base) for base in numbers]
        if min(thetas) <= 1:
            raise UserError(f"Attention Buckets: a base of {min(numbers)} gives a theta of {min(thetas)}; it must be above 1")
        ropes = [replace(config.rope, rope_theta=theta) for theta in thetas]
        tables = [replace(config, rope=rope).rope_table(length) for rope in ropes]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables)
        return TableMethod(stacked, merge=Merge(weights, mix), passes=float(len(tables)))

    return make


def choices(tuning: Tuning) -> list[Choice]:
    """Each set of bases, mixing logits or probabilities."""
    kinds = [(bases, mix) for bases in BASES for mix in MIXES][: tuning.budget]
    return [Choice(f"{bases}, {mix}", attention_buckets(bases, mix=mix)) for bases, mix in kinds]


@dataclass(frozen=True)
class Merge:
    """The `merge` of a `TableMethod`; hashable, so `jax.jit` treats equal ones as the same."""

    weights: str
    mix: str

    def __call__(self, logits: Float[Array, "n B A V"]) -> Float[Array, "B A V"]:
        log_probabilities = jax.nn.log_softmax(logits)
        confidence = logits.max(-1) if self.weights == "max_logit" else jnp.exp(log_probabilities.max(-1))
        if self.mix == "logits":
            return (jax.nn.softmax(confidence, axis=0)[..., None] * logits).sum(0)
        return jax.nn.logsumexp(jax.nn.log_softmax(confidence, axis=0)[..., None] + log_probabilities, axis=0)


def wave(base: float, head_dim: int, distances: Int[np.ndarray, "M"]) -> Float[np.ndarray, "M"]:
    """q . k / sqrt(D) of a query and a key of ones, by their distance in tokens: 2 / sqrt(D) sum_i cos(m base^(-2i/D))."""
    inv_freq = base ** (-np.arange(0, head_dim, 2) / head_dim)
    return 2 / math.sqrt(head_dim) * np.cos(distances[:, None] * inv_freq).sum(-1)


def choose_bases(
    theta: float,
    head_dim: int,
    count: int = 6,
    distances: tuple[int, int] = (1000, 4090),
    candidates: Sequence[float] | None = None,
    tolerance: int = 3,
) -> list[float]:
    """The offline search for bases, without a model: start with theta, then add bases that fill the troughs of those chosen.

    It adds the candidate with the most pairs of a peak of its wave and an uncovered trough of the chosen bases that are at most
    `tolerance` tokens apart. Ties are broken by the smallest mean squared distance of these pairs, then by the smallest base. A
    trough is covered if a peak of a chosen base is as near. A wave has at most six peaks and six troughs. If no candidate
    covers another trough, fewer than `count` bases are returned. `attention_buckets(..., relative=False)` accepts the result.

    Peaks and troughs are those of the released code. That code also counts troughs on peaks, counts only exact coincidences as
    covered, and starts from bases set by hand (10000, 18000, 19000). From 10000 alone, neither version gives the published
    sets.

    Args:
        theta: The model's base.
        head_dim: D.
        count: Bases to choose, including theta.
        distances: The first and last distance that are considered, in tokens.
        candidates: Default: theta to 3 theta in steps of theta / 20.
        tolerance: In tokens.
    """
    if not (theta > 1 and count >= 1 and 0 <= distances[0] < distances[1] and tolerance >= 0 and head_dim >= 2):
        raise UserError("Attention Buckets: the search needs theta > 1, count >= 1, tolerance >= 0, distances (first, last)")
    considered = np.arange(distances[0], distances[1] + 1)
    steps = [theta * step / 20 for step in range(20, 61)] if candidates is None else [float(base) for base in candidates]
    waves = {base: wave(base, head_dim, considered) for base in (theta, *steps)}
    peaks = {base: considered[peaks_of(values)] for base, values in waves.items()}
    troughs = {base: considered[troughs_of(values)] for base, values in waves.items()}
    chosen = [float(theta)]
    while len(chosen) < count:
        filled = np.concatenate([peaks[base] for base in chosen])
        open_troughs = np.concatenate([troughs[base] for base in chosen])
        open_troughs = open_troughs[(np.abs(open_troughs[:, None] - filled) > tolerance).all(-1)]

        def hits(base: float, wanted: np.ndarray = open_troughs) -> Int[np.ndarray, "pairs"]:
            apart = np.abs(peaks[base][:, None] - wanted)
            return apart[apart <= tolerance]

        found = {base: near for base in waves if base not in chosen and len(near := hits(base))}
        if not found:
            break
        chosen.append(min(found, key=lambda base: (-len(found[base]), np.mean(found[base] ** 2), base)))
    return sorted(chosen)


def peaks_of(values: Float[np.ndarray, "M"]) -> Int[np.ndarray, "peaks"]:
    """Indices of the highest local maximum, then repeatedly of the highest one 51 to 550 further on; six at most."""
    maxima = 1 + np.flatnonzero((values[1:-1] > values[:-2]) & (values[1:-1] > values[2:]))
    found, ahead = [], maxima
    while len(ahead) and len(found) < 6:
        found.append(ahead[values[ahead].argmax()])
        ahead = maxima[(maxima > found[-1] + 50) & (maxima <= found[-1] + 550)]
    return np.array(found, int)


def troughs_of(values: Float[np.ndarray, "M"]) -> Int[np.ndarray, "troughs"]:
    """Indices of the lowest local minimum, then repeatedly of the lowest one more than 60 before it; six at most."""
    minima = 1 + np.flatnonzero((values[1:-1] < values[:-2]) & (values[1:-1] < values[2:]))
    found, before = [], minima
    while len(before) and len(found) < 6:
        found.append(before[values[before].argmin()])
        before = minima[minima < found[-1] - 60]
    return np.array(found[::-1], int)
