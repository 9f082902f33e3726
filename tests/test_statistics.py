"""Statistics against values worked out by hand, by enumeration, or known from the literature."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection import mostly_long

from lpes_jax.statistics import (
    bootstrap_intervals,
    confidence_sequence,
    mcnemar,
    paired_permutation_test,
    sequential_mcnemar,
    standard_error,
    wilson_interval,
)


def test_standard_error_of_one_position():
    # sqrt(p (1 - p) / (n - 1)) with p = 1/2, n = 4
    assert standard_error(np.array([True, True, False, False])) == pytest.approx(math.sqrt(0.25 / 3))
    assert standard_error(np.ones(10, bool)) == 0.0
    assert math.isnan(standard_error(np.array([True])))


def test_standard_error_counts_questions_not_answers():
    assert standard_error(np.array([[True, False], [False, True]])) == 0.0  # each question: half right
    assert standard_error(np.array([[True, True], [False, False]])) == pytest.approx(0.5)
    one = np.array([True, True, False, False])
    assert standard_error(np.stack([one] * 5, axis=1)) == pytest.approx(standard_error(one))


def test_wilson_interval():
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)  # z² / (n + z²)
    assert wilson_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    z = 1.6448536269514722  # 90 %
    assert wilson_interval(0, 10, confidence=0.9)[1] == pytest.approx(z * z / (10 + z * z))


@given(st.integers(1, 500), st.data())
def test_wilson_interval_holds_the_share_and_mirrors(n, data):
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n + 1e-12 and successes / n - 1e-12 <= high <= 1
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_bootstrap_of_three_questions_against_enumeration():
    values = np.array([[0.0, 1.0], [3.0, 0.0], [6.0, 2.0]])
    with_mean = np.column_stack([values, values.mean(axis=1)])
    means = np.array([with_mean[list(drawn)].mean(axis=0) for drawn in itertools.product(range(3), repeat=3)])
    exact = np.quantile(np.repeat(means, 1000, axis=0), [0.1, 0.9], axis=0).T
    np.testing.assert_allclose(bootstrap_intervals(values, confidence=0.8), exact)
    np.testing.assert_array_equal(bootstrap_intervals(values), bootstrap_intervals(values))  # seeded


def test_bootstrap_of_many_questions_is_the_normal_interval_and_by_question():
    rng = np.random.default_rng(0)
    ours, baseline = (rng.random((400, 1)) < share for share in (0.7, 0.6))
    difference = ours.astype(float) - baseline
    half = 1.959964 * difference.std() / 20
    at_one = bootstrap_intervals(difference)
    np.testing.assert_allclose(at_one[0], difference.mean() + np.array([-half, half]), atol=0.006)
    # The same differences at five positions are no more evidence than at one; without any there is no spread.
    np.testing.assert_allclose(bootstrap_intervals(np.repeat(difference, 5, axis=1)), np.repeat(at_one[:1], 6, axis=0))
    assert bootstrap_intervals(difference * 0).tolist() == [[0, 0]] * 2


def test_permutation_test_against_enumeration():
    baseline = np.zeros((8, 2))
    ours = np.array([[1, 1], [1, 0], [0, -1], [1, 1], [0, 1], [0, 0], [1, 1], [0, 1]], float)
    differences = ours.sum(axis=1)
    extreme = [abs(np.dot(signs, differences)) >= abs(differences.sum()) for signs in itertools.product((-1.0, 1.0), repeat=8)]
    exact = np.mean(extreme)
    assert 0.01 < exact < 0.2
    assert paired_permutation_test(ours, baseline, draws=20_500) == pytest.approx(exact, abs=0.01)


def test_permutation_test_known_answers():
    right, wrong = np.ones((40, 5), bool), np.zeros((40, 5), bool)
    assert paired_permutation_test(right, wrong) == 1 / 10_001  # 2 in 2^40 sign patterns are as extreme
    assert paired_permutation_test(right, right) == 1.0
    assert paired_permutation_test(right, wrong, draws=99) == 1 / 100


def test_permutation_test_is_two_sided_seeded_and_by_question():
    rng = np.random.default_rng(0)
    ours, baseline = rng.random((30, 1)) < 0.6, rng.random((30, 1)) < 0.45
    p = paired_permutation_test(ours, baseline)
    assert 0.02 < p < 0.98
    assert paired_permutation_test(baseline, ours) == p
    assert paired_permutation_test(ours, baseline, seed=1) == pytest.approx(p, abs=0.03)
    # The same answers at five positions are no more evidence than at one.
    assert paired_permutation_test(np.repeat(ours, 5, axis=1), np.repeat(baseline, 5, axis=1)) == p


def discordant(only_a: int, only_b: int, both: int = 3) -> tuple[np.ndarray, np.ndarray]:
    a = np.array([True] * only_a + [False] * only_b + [True] * both)
    b = np.array([False] * only_a + [True] * only_b + [True] * both)
    return a, b


@pytest.mark.parametrize(
    "only_a, only_b, p",
    [
        (8, 1, 2 * (1 + 9) / 2**9),
        (1, 8, 2 * (1 + 9) / 2**9),
        (5, 0, 2 / 2**5),
        (6, 2, 2 * (1 + 8 + 28) / 2**8),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_by_hand(only_a, only_b, p):
    assert mcnemar(*discordant(only_a, only_b)) == pytest.approx(p)


def test_mcnemar_of_many_questions_does_not_overflow():
    # Normal approximation with continuity correction: z = (|1100 - 900| - 1) / sqrt(2000) = 4.4498
    assert mcnemar(*discordant(1100, 900)) == pytest.approx(math.erfc(4.4498 / math.sqrt(2)), rel=0.02)


@pytest.mark.parametrize("shares", mostly_long([(1,), (0.25, 0.25, 0.25, 0.25)], (0.25, 0.25, 0.25, 0.25)))
def test_a_confidence_sequence_holds_however_often_one_looks(shares):
    """Of 100 runs with an alpha of 10 %, seen after every fifth value, few leave the bounds."""
    rng, mean, misses = np.random.default_rng(3), 0.85, 0
    for _ in range(100):
        values = (rng.random((48, len(shares))) < mean) @ np.array(shares)
        bounds = [confidence_sequence(values[:n], 0.1) for n in range(3, 49, 5)]
        misses += not all(low <= mean <= high for low, high in bounds)
    assert misses <= 10


def test_bounds_of_a_confidence_sequence():
    assert confidence_sequence(np.zeros(0), 0.05) == (0.0, 1.0)
    low, high = confidence_sequence(np.ones(64), 0.05)
    assert high == 1.0 and 0.05 ** (1 / 64) * 0.93 < low < 0.025 ** (1 / 64)  # no bettor beats all on one card
    assert confidence_sequence(np.zeros(64), 0.05) == pytest.approx((0.0, 1 - low))
    sure, unsure = (confidence_sequence(np.tile(values, 30), 0.05) for values in ([0.8, 0.9], [1.0, 0.7]))
    assert unsure[0] < sure[0] < 0.85 < sure[1] < unsure[1]
    wide, narrow = (confidence_sequence(np.tile([1.0, 0.0], 50), alpha) for alpha in (0.001, 0.1))
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]


def test_sequential_mcnemar_holds_at_any_time_and_costs_little():
    assert sequential_mcnemar(0, 0) == sequential_mcnemar(6, 6) == 1.0
    assert sequential_mcnemar(12, 1) == sequential_mcnemar(1, 12) < 0.05
    assert mcnemar(np.arange(13) < 12, np.arange(13) >= 12) < sequential_mcnemar(12, 1)
    rng, fooled = np.random.default_rng(1), 0
    for _ in range(300):
        wins = np.cumsum(rng.random(80) < 0.5)
        fooled += any(sequential_mcnemar(int(wins[n - 1]), int(n - wins[n - 1])) <= 0.1 for n in range(1, 81))
    assert fooled <= 30
