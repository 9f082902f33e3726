"""Statistics of differences. A question asked at five positions is one question, not five: tests pair and group by question.

Letters: Q questions, S positions (slots). Imports numpy, scipy and the standard library only.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import betaln


def standard_error(correct: Shaped[np.ndarray, "Q *S"]) -> float:
    """Standard error of the mean of `correct` [Q] or [Q, S], over questions: sqrt(sample variance / Q).

    For one position this is lm-evaluation-harness's acc_stderr, sqrt(p (1 - p) / (Q - 1)). For several, each question counts
    once, with its mean. A single question has no variance: nan.
    """
    questions = correct.reshape(len(correct), -1).mean(axis=1, dtype=np.float64)
    return float(questions.std(ddof=1) / math.sqrt(len(questions))) if len(questions) > 1 else math.nan


def wilson_interval(successes: float | int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson, 1927), within [0, 1]; the whole range if n is 0."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_intervals(
    values: Shaped[np.ndarray, "Q S"], confidence: float = 0.95, seed: int = 0, draws: int = 10_000
) -> Float[np.ndarray, "S+1 2"]:
    """Percentile intervals (Efron, 1979) of the mean of each column, then of all columns, with questions resampled.

    For `ours - baseline` these are paired intervals of the difference. All columns use the same resamples.
    """
    columns = np.column_stack([values, values.mean(axis=1)]).astype(np.float64)
    rng, means = np.random.default_rng(seed), np.empty((draws, columns.shape[1]))
    for start in range(0, draws, 200):  # 200 at a time bounds the memory
        drawn = rng.integers(0, len(columns), size=(min(200, draws - start), len(columns)))
        means[start : start + len(drawn)] = columns[drawn].mean(axis=1)
    tail = (1 - confidence) / 2
    return np.quantile(means, [tail, 1 - tail], axis=0).T


def paired_permutation_test(
    ours: Shaped[np.ndarray, "Q S"], baseline: Shaped[np.ndarray, "Q S"], seed: int = 0, draws: int = 10_000
) -> float:
    """Two-sided p of the mean difference, by random sign flips of each question's difference (summed over its positions).

    p = (1 + draws at least as far from 0 as the observed one) / (1 + draws), never 0 (Phipson & Smyth, 2010).
    """
    # Sums, not means: for accuracies these are small integers, so ties are exact.
    differences = (ours.astype(np.float64) - baseline.astype(np.float64)).sum(axis=1)
    observed = abs(differences.sum()) - 1e-9 * np.abs(differences).sum()
    rng = np.random.default_rng(seed)
    count = 0
    for start in range(0, draws, 1000):  # 1000 at a time bounds the memory
        signs = 1.0 - 2.0 * rng.integers(0, 2, size=(min(1000, draws - start), len(differences)))
        count += int((np.abs(signs @ differences) >= observed).sum())
    return (1 + count) / (1 + draws)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction for multiple comparisons, in the order of `p_values`; None stays None."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[index] = largest
    return corrected


def mcnemar(a: Shaped[np.ndarray, "Q"], b: Shaped[np.ndarray, "Q"]) -> float:
    """McNemar's exact test, two-sided: whether the questions that only one of the two answers right split evenly."""
    a, b = a.astype(bool), b.astype(bool)
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    n = only_a + only_b
    term = total = 1  # binomial coefficients, exact: C(n, 0) + ... + C(n, fewer)
    for k in range(min(only_a, only_b)):
        term = term * (n - k) // (k + 1)
        total += term
    return min(1.0, 2 * total / 2**n)


def confidence_sequence(values: Shaped[np.ndarray, "Q"], alpha: float) -> tuple[float, float]:
    """Bounds of the mean of independent values in [0, 1], valid at every sample size at once.

    With probability 1 - alpha the mean is within the bounds after every value. So the bounds may be checked at any time, and
    values added until a decision is reached. The method is betting: a gambler stakes a share f of the capital on values above a
    mean m, at odds that are fair for m. The capital, prod(1 + f (x - m) / m) averaged over f, ever reaches 2 / alpha with
    probability at most alpha / 2 if m is the mean (Ville's inequality; Waudby-Smith & Ramdas, 2024, section 4). So m is refuted
    when the capital reaches 2 / alpha. The average over f replaces their betting strategy, as in Cover's universal portfolio.
    The upper bound is that of 1 - x.
    """
    found, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    return _lower_bound(found, counts, alpha), 1 - _lower_bound(1 - found, counts, alpha)


_STAKES = np.sin(np.pi / 2 * (np.arange(64) + 0.5) / 64) ** 2


def _lower_bound(values: Float[np.ndarray, "V"], counts: Shaped[np.ndarray, "V"], alpha: float) -> float:
    low, high = 0.0, float(values @ counts) / max(1, counts.sum())
    for _ in range(40):  # bisection: the capital falls as the mean rises
        mean = (low + high) / 2
        if mean == 0:
            break
        capitals = counts @ np.log1p(np.outer(values / mean - 1, _STAKES))
        most = capitals.max()
        refuted = most + math.log(np.exp(capitals - most).mean()) >= math.log(2 / alpha)
        low, high = (mean, high) if refuted else (low, mean)
    return float(low)


def sequential_mcnemar(only_a: int, only_b: int) -> float:
    """McNemar's test, two-sided, for a sample that grows until the result is clear: p is valid at every sample size.

    p is the inverse of Robbins' mixture of likelihood ratios against a fair coin, with Jeffreys' prior. Under the null
    hypothesis it ever falls to alpha with probability at most alpha, however often it is checked.
    """
    ratio = float(betaln(only_a + 0.5, only_b + 0.5) - betaln(0.5, 0.5)) + (only_a + only_b) * math.log(2)
    return min(1.0, math.exp(-ratio)) if ratio > 0 else 1.0
