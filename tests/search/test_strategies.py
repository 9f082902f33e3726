"""evosax's algorithms in a box: each one on a quadratic with a known optimum, and the costs that it gets for chosen fitness."""

import math

import jax
import numpy as np
import pytest
from evosax.algorithms import algorithms
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.search.strategies import NAMES, BudgetSpent, _Costs, run_strategy, strategy

pytestmark = pytest.mark.promotes  # evosax's own ask and tell promote dtypes
START = np.full(6, 1.5)
TARGET = np.array([1.2, 1.8, 1.4, 1.65, 1.3, 1.55])
LOW, HIGH, POPULATION, GENERATIONS = 1.0, 2.0, 8, 24  # the same for all tests: each algorithm is compiled once
WELL_KNOWN = ("cma_es", "sep_cma_es", "snes", "open_es", "pgpe", "differential_evolution", "pso", "simple_ga", "hill_climbing")
POPULATION_BASED = {
    "differential_evolution",
    "diffusion_evolution",
    "gesmr_ga",
    "learned_ga",
    "mr15_ga",
    "pso",
    "samr_ga",
    "simple_ga",
    "random",
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all of the time here is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def quadratic(genes):
    return -np.square(genes - TARGET).sum(axis=1)


def corner(genes):
    """Its optimum, 0, is on the border of the box in three genes; points outside would be better."""
    beyond = np.array([0.5, 0.5, 0.5, 1.3, 1.6, 1.45])
    return 0.75 - np.square(genes - beyond).sum(axis=1)


def search(name, function=quadratic, seed=0, start=START, budget=math.inf):
    """The generations that were scored and their fitness; at most `budget` points are scored."""
    generations, scores = [], []

    def score(generation, genes):
        assert generation == len(generations)
        left = int(min(len(genes), budget - sum(map(len, generations))))
        generations.append(genes[:left])
        scores.append(function(genes[:left]))
        if left < len(genes):
            raise BudgetSpent
        return scores[-1]

    run_strategy(strategy(name, start, LOW, HIGH, POPULATION), score, seed, GENERATIONS)
    return generations, scores


def best(name, **arguments):
    return np.nanmax(np.concatenate(search(name, **arguments)[1]))


def test_names_are_all_that_need_no_argument():
    left_out = {"random_search", "sv_cma_es", "sv_open_es"}
    modules = {algorithm.__module__.rpartition(".")[2] for algorithm in algorithms.values()}
    assert set(NAMES) == modules - left_out | {"random"}
    assert {"cma_es", "sep_cma_es", "open_es", "differential_evolution", "pso", "simple_ga", "evotf_es"} <= set(NAMES)


@pytest.mark.parametrize("name", mostly_long(NAMES, "random", "cma_es", "snes", "pso"))
def test_every_algorithm(name):
    generations, scores = search(name)
    points = np.concatenate(generations)
    assert (generations[0][0] == START).all()
    first = POPULATION if name in POPULATION_BASED else 1
    assert [len(genes) for genes in generations] == [first] + GENERATIONS * [POPULATION]
    assert ((points >= LOW) & (points <= HIGH)).all()
    assert np.concatenate(scores).max() > quadratic(START[None])[0]
    assert len(np.unique(generations[-1], axis=0)) > 1

    again, other = (np.concatenate(search(name, seed=seed, budget=40)[0]) for seed in (0, 1))
    assert (again == points[:40]).all()
    assert (other[first:] != points[first:40]).mean() > 0.5

    # NaN in half of the box, where the optimum is not; then everywhere, the start included.
    broken, scores = search(name, lambda genes: np.where(genes[:, 0] > 1.5, np.nan, quadratic(genes)), budget=100)
    assert np.isfinite(np.concatenate(broken)).all()
    assert name == "random" or np.nanmax(np.concatenate(scores)) > quadratic(START[None])[0]
    lost, _ = search(name, lambda genes: np.full(len(genes), np.nan), budget=40)
    assert np.isfinite(np.concatenate(lost)).all()


@pytest.mark.parametrize("name", mostly_long(WELL_KNOWN, "cma_es", "snes", "pso"))
def test_well_known_ones_are_better_than_random_search(name):
    """At most half as far, as a square, from the optimum; the median of three seeds."""
    reached, by_chance = (np.median([best(each, seed=seed) for seed in range(3)]) for each in (name, "random"))
    assert reached > by_chance / 2


@pytest.mark.parametrize("seed", [2, 4])
@pytest.mark.parametrize("name", ["cma_es", "snes"])
def test_optimum_at_the_edge(name, seed):
    """The last generation lies about it. CMA-ES told clipped points gets stuck (seed 2), without penalty it goes astray (4)."""
    generations, scores = search(name, corner, seed=seed)
    assert np.concatenate(scores).max() > -0.03
    distances = np.linalg.norm(generations[-1] - np.array([1.0, 1.0, 1.0, 1.3, 1.6, 1.45]), axis=1)
    assert np.median(distances) < 0.3


@pytest.mark.parametrize("budget", [1, 9, 13, 57])
@pytest.mark.parametrize("name", ["random", "cma_es", "differential_evolution"])
def test_a_spent_budget_ends_the_search(name, budget):
    whole, _ = search(name)
    part, _ = search(name, budget=budget)
    assert (np.concatenate(part) == np.concatenate(whole)[:budget]).all()


@pytest.mark.parametrize(
    "name", mostly_long(["cma_es", "simulated_annealing", "diffusion_evolution", "guided_es"], "cma_es", "simulated_annealing")
)
@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
def test_the_size_of_fitness_does_not_matter(name, scale):
    points = [np.concatenate(search(name, f, start=TARGET + 0.1)[0]) for f in (corner, lambda x: scale * corner(x))]
    assert (points[0] == points[1]).all()


def test_costs():
    """Told so far: first fitness 1, range 2 (of the first generation with any), worst 4 (a point outside)."""
    costs = _Costs()
    nan, inside = np.nan, np.zeros(3)
    assert costs(np.array([nan]), inside[:1]).tolist() == [1.0]
    assert costs(np.array([1.0]), inside[:1]).tolist() == [0.0]
    assert costs(np.array([1.0, nan, np.inf]), inside).tolist() == [0.0, 1.0, 1.0]
    assert costs(np.array([1.0, 3.0, -np.inf]), inside).tolist() == [0.0, -1.0, 1.0]
    assert costs(np.array([5.0, 1.0, nan]), np.array([2.5, 2.0, 0.0])).tolist() == [3.0, 4.0, 6.0]


def test_a_start_at_the_edge_in_float32():
    start = np.full(6, 1.1, np.float32)  # which is more than 1.1
    chosen = strategy("random", start, 0.7, 1.1, 1)
    seen = []
    run_strategy(chosen, lambda _, genes: seen.append(genes) or np.zeros(1), seed=0, generations=0)
    assert [genes.tolist() for genes in seen] == [[[1.1] * 6]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("cma-es", START, LOW, HIGH, 8), r"cma-es is not known; the closest are .*\bcma_es\b"),
        (("adam", START, LOW, HIGH, 8), "adam is not known"),
        (("open_es", START, LOW, HIGH, 7), "--population-size 7: --algorithm open_es refuses it: .*even"),
        (("differential_evolution", START, LOW, HIGH, 3), "--population-size 3.*>= 4"),
        (("lm_ma_es", START, LOW, HIGH, 13), "--population-size 13.*twice.* 6 "),
        (("random", START, LOW, HIGH, 0), "--population-size 0"),
        (("cma_es", START, LOW, HIGH, 1), "--population-size 1"),
        (("cma_es", START, HIGH, LOW, 8), "lower bound 2.0 must be below the upper bound 1.0"),
        (("cma_es", START * np.nan, LOW, HIGH, 8), "start is not in the box"),
        (("cma_es", START + 1, LOW, HIGH, 8), "start is not in the box"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(UserError, match=message) as refusal:
        strategy(*arguments)
    assert "\n" not in str(refusal.value)
