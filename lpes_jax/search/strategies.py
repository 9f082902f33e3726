"""evosax's algorithms as searches in a box, by name, for comparison with the paper's genetic algorithm.

    chosen = strategy("cma_es", start, low=1.0, high=2.0, population_size=32)     # or UserError
    run_strategy(chosen, score, seed=0, generations=20)     # score(generation, genes [P, N]) -> fitness [P], to be maximised

`NAMES` are all of evosax's algorithms without required arguments, by their module names, and `random`: uniform points in the
box. For every algorithm:

- `score` gets points inside the box only, and the first of all (individual 0 of generation 0) is `start`.
- `score` may raise `BudgetSpent` to end the search. `run_strategy` returns nothing; `score` has seen all results.
- A fitness that is not finite ranks below all finite ones.
- The seed decides everything. Keys are per generation, so a longer search begins like a shorter one, except for algorithms
  that spread a schedule over the generations (below).

evosax has no bounds and minimises. It is driven as follows:

- It sees u = (genes - middle of the box) / unit, and the unit is 0.15 of the box's width. So its defaults, which assume a
  first standard deviation of 1, hold for any box.
- Population-based algorithms (differential evolution, particle swarm, genetic algorithms, diffusion): generation 0 is `start`
  and P - 1 uniform points. A point outside is moved to the box's nearest point, which `tell` gets; a particle loses the
  velocity with which it hit the wall.
- Distribution-based algorithms (all others): the mean begins at `start`. Generation 0 is only `start`, without a `tell`,
  because several algorithms take every point of a `tell` for one that they sampled. Later generations have P points. A point
  outside is scored at the box's nearest point, with a penalty of the squared distance in box widths, times the range of all
  fitness so far. But `tell` gets it as it was sampled: with clipped points, CMA-ES's step size diverges.
- `tell` gets (first fitness - fitness) / range, with the range of the first generation in which it is not 0. So a search is
  the same whether fitness differs by 0.01 or by 100. A fitness that is not finite becomes one range (of all so far) more than
  the worst so far.
- Defaults for long searches are replaced. A fixed standard deviation shrinks geometrically to a tenth over the generations.
  Estimators of a gradient step by Adam, at most about 0.5 units at first and a tenth of that at the end (evosax: 0.001).
  Diffusion evolution's schedule spans the generations. Gradientless descent's largest radius is 1 unit.

Letters: P population, N genes.
"""

import contextlib
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from evosax.algorithms import algorithms
from evosax.algorithms.population_based.base import PopulationBasedAlgorithm
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.search.stop import BudgetSpent

UNIT = 0.15  # of the box's width: the first standard deviation
PENALTY = 1.0  # for a point one box width outside, in ranges of fitness
SHRINKAGE = 0.1  # of step sizes that do not adapt, over the whole search
LEARNING_RATE = 0.5  # of Adam, in units
RANDOM = "random"
GRADIENT_ESTIMATORS = ("ars", "asebo", "esmc", "guided_es", "noise_reuse_es", "open_es", "persistent_es", "pgpe")
CHANGED_PARAMS = {"cma_anchored_les": {"std_init": 1.0}, "gradientless_descent": {"radius_max": 1.0}}


def _needs_no_more(algorithm: type) -> bool:
    parameters = inspect.signature(algorithm).parameters.values()
    return {p.name for p in parameters if p.default is p.empty} == {"population_size", "solution"}


_CLASSES: dict[str, type] = {
    algorithm.__module__.rpartition(".")[2]: algorithm for algorithm in algorithms.values() if _needs_no_more(algorithm)
}
NAMES: tuple[str, ...] = (RANDOM, *sorted(_CLASSES))

Score = Callable[[int, Float[np.ndarray, "P N"]], Float[np.ndarray, "P"]]


@dataclass(frozen=True, eq=False)
class Strategy:
    """A search, made by `strategy`. The box is [low, high] in each of the N genes."""

    name: str
    start: Float[np.ndarray, "N"]
    low: float
    high: float
    population_size: int

    def to_units(self, genes: Float[np.ndarray, "*P N"]) -> Float[np.ndarray, "*P N"]:
        """Genes in evosax's units, float32."""
        width = self.high - self.low
        return ((genes - (self.low + self.high) / 2) / (UNIT * width)).astype(np.float32)

    def to_genes(self, units: Float[np.ndarray, "*P N"]) -> Float[np.ndarray, "*P N"]:
        """The point of the box, float64, nearest to a point in evosax's units."""
        width = self.high - self.low
        return np.clip((self.low + self.high) / 2 + UNIT * width * units.astype(np.float64), self.low, self.high)


def strategy(name: str, start: Float[np.ndarray, "N"], low: float, high: float, population_size: int) -> Strategy:
    """A search by name (one of `NAMES`). Raises UserError for an unknown name, an invalid box or population size."""
    if name not in NAMES:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), NAMES, n=3, cutoff=0.5)
        raise UserError(f"--algorithm {name} is not known; {'the closest are' if close else 'use'} {', '.join(close or NAMES)}")
    if not -np.inf < low < high < np.inf:
        raise UserError(f"--algorithm {name}: the lower bound {low} must be below the upper bound {high}")
    inside = np.clip(start.astype(np.float64), low, high)
    if start.size == 0 or not (abs(start - inside) <= 1e-6 * (high - low)).all():  # 1.1 is more than 1.1 in float32
        raise UserError(f"--algorithm {name}: the start is not in the box from {low} to {high}; move it or the bounds")
    least = 1 if name == RANDOM else 2
    if population_size < least:
        raise UserError(f"--population-size {population_size}: --algorithm {name} needs at least {least}")
    chosen = Strategy(name, inside, low, high, population_size)
    if name == RANDOM:
        return chosen
    if name == "lm_ma_es" and population_size > 2 * start.size:  # otherwise it takes the square root of a negative number
        most = f"needs at most twice as many as the {start.size} numbers that it searches"
        raise UserError(f"--population-size {population_size}: --algorithm lm_ma_es {most}")
    try:
        _algorithm(name, population_size, start.size, generations=1)
    except AssertionError as error:  # evosax checks its arguments with assert
        raise UserError(f"--population-size {population_size}: --algorithm {name} refuses it: {error}") from None
    return chosen


def run_strategy(strategy: Strategy, score: Score, seed: int, generations: int) -> None:
    """Run generation 0 and then `generations` more, or until `score` raises BudgetSpent.

    `score(generation, genes)` returns the fitness of genes [P, N] (float64, inside the box), which is maximised. Generation 0
    of a distribution-based algorithm is only the start (P = 1). Raises UserError if an algorithm produces points
    that are not finite.
    """
    search = _sample if strategy.name == RANDOM else _evolve
    with contextlib.suppress(BudgetSpent):
        search(strategy, score, generations, jax.random.key(seed))


def _sample(strategy: Strategy, score: Score, generations: int, key: jax.Array) -> None:
    for generation in range(generations + 1):
        score(generation, _uniform(strategy, jax.random.fold_in(key, generation), start=generation == 0))


def _evolve(strategy: Strategy, score: Score, generations: int, key: jax.Array) -> None:
    """evosax's init, ask and tell. Keys: one for the start, one for init, one for each generation's ask and tell."""
    algorithm = _algorithm(strategy.name, strategy.population_size, len(strategy.start), generations)
    params = algorithm.default_params.replace(**CHANGED_PARAMS.get(strategy.name, {}))
    repairs = isinstance(algorithm, PopulationBasedAlgorithm)
    costs = _Costs()
    key_init = jax.random.fold_in(key, 1)
    if repairs:
        genes = _uniform(strategy, jax.random.fold_in(key, 0), start=True)
        state = algorithm.init(key_init, strategy.to_units(genes), costs(score(0, genes), np.zeros(len(genes))), params)
    else:
        costs(score(0, strategy.start[None]), np.zeros(1))
        state = algorithm.init(key_init, strategy.to_units(strategy.start), params)
    for generation in range(1, generations + 1):
        key_ask, key_tell = jax.random.split(jax.random.fold_in(key, generation + 1))
        state = jax.tree.map(np.asarray, state)  # removes weak types, for which JAX would compile everything twice
        with jax.default_matmul_precision("highest"):
            asked, state = jax.tree.map(np.asarray, algorithm.ask(key_ask, state, params))
        if not np.isfinite(asked).all():
            way_out = "use a larger --population-size or another algorithm"
            raise UserError(f"--algorithm {strategy.name}: its points are not finite in generation {generation}; {way_out}")
        nearest = np.clip(asked, -0.5 / UNIT, 0.5 / UNIT)
        outside = np.square((asked - nearest) * UNIT, dtype=np.float64).sum(axis=1)
        fitness = score(generation, strategy.to_genes(asked))
        told, cost = (nearest, costs(fitness, 0 * outside)) if repairs else (asked, costs(fitness, outside))
        with jax.default_matmul_precision("highest"):
            state, _ = algorithm.tell(key_tell, told, cost, state, params)
        if strategy.name == "pso":
            state = state.replace(velocity=np.where(nearest == asked, state.velocity, np.float32(0)))


def _uniform(strategy: Strategy, key: jax.Array, start: bool) -> Float[np.ndarray, "P N"]:
    """A uniform generation in the box, float64. With `start`, its individual 0 is the start."""
    share = np.asarray(jax.random.uniform(key, (strategy.population_size, len(strategy.start))), np.float64)
    genes = np.clip(strategy.low + share * (strategy.high - strategy.low), strategy.low, strategy.high)
    return np.concatenate([strategy.start[None], genes[1:]]) if start else genes


@cache  # JAX caches programs by the identity of the algorithm; other seeds share it
def _algorithm(name: str, population_size: int, num_genes: int, generations: int) -> Any:
    kind = _CLASSES[name]
    options: dict[str, Any] = {}
    if "std_schedule" in inspect.signature(kind).parameters:
        options["std_schedule"] = optax.exponential_decay(1.0, max(generations, 1), SHRINKAGE)
    if name in GRADIENT_ESTIMATORS:
        options["optimizer"] = optax.adam(optax.exponential_decay(LEARNING_RATE, max(generations, 1), SHRINKAGE))
    if name == "diffusion_evolution":
        options["num_generations"] = generations + 1
    return kind(population_size=population_size, solution=jnp.zeros(num_genes), metrics_fn=lambda *_: {}, **options)


class _Costs:
    """Fitness converted for evosax: minimised, scaled and finite (see the top of this file)."""

    def __init__(self):
        self.seen = np.zeros(0)  # empty, or the first, the lowest and the highest fitness so far
        self.scale = 0.0
        self.worst = 0.0

    def __call__(self, fitness: Float[np.ndarray, "P"], outside: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P"]:
        """The costs, float32, of a generation whose points lie outside the box by `outside`: squared, in box widths."""
        finite = np.isfinite(fitness)
        values = np.concatenate([self.seen, fitness[finite].astype(np.float64)])
        if len(values):
            self.seen = np.array([values[0], values.min(), values.max()])
            self.scale = self.scale or np.ptp(values)
        spread = np.ptp(self.seen) / self.scale if self.scale else 1.0
        costs = PENALTY * spread * outside
        costs[finite] += (self.seen[:1] - fitness[finite]) / (self.scale or 1.0)
        self.worst = max([self.worst, *costs[finite]])
        costs[~finite] += self.worst + spread
        return costs.astype(np.float32)
