"""The paper's genetic algorithm (section 3.2, Algorithm 1, Appendices B and E) as an evosax algorithm.

    ga = PaperGA(Lattice(num_layers=32), GeneticSettings())
    params = ga.default_params
    population, lineage = ga.initial_population(key, params)           # generation 0, N_ps individuals
    state = ga.init(key, population, -fitness(ga.control_points(population)), params)
    for key in keys:                                                   # T generations, or jax.lax.scan
        population, state = ga.ask(key, state, params)                 # N_mu + 2 N_cr candidates; state.lineage: their origin
        state, metrics = ga.tell(key, population, -fitness(ga.control_points(population)), state, params)
    best = ga.control_points(state.best_solution.reshape(-1, 2))

evosax minimises, so it gets minus the fitness. Everything works with jit, vmap and scan, and the key determines all results.
Where the paper leaves a choice open, this module decides:

- Genes are `[C, 2]`: (x, y) of every control point, float32. If factors and gains are both learnt, they are `[C, 3]`:
  (x, factor, gain), all rules for y apply to both, and 2C below is 3C. On a lattice (step > 0; Table 9: 1 and 0.1) genes are
  integer codes, exact in float32: x = code * x_step, y = min_factor + code * y_step. On a continuous axis (step 0) they are
  the values.
- Eq. 8: k (L-1)/d is rounded to the lattice, half to even: 10 and 21 for L = 32. All others of generation 0 are its mutations.
- Select-Parents: the N_pa fittest; of equals, the one evaluated first. Selection is at the end of `init` and `tell` instead of
  the start of `ask`, so the state contains only the parents and its size does not depend on N_ps. Parents compete with their
  offspring, so the best stays. A NaN fitness sorts last; such individuals become parents only if too few others are left.
- Mutation, Eq. 9: the parent is drawn uniformly. The ranges come from the parent's points, so all points can move at once. A
  point is redrawn with probability `mutation_rate`, uniformly over its closed range. All points are drawn again until Eq. 10
  holds, at most 64 times; after that x stays the parent's. So `max_change_x = 0` pins x.
- Crossover: two different parents, one cut in 1 .. 2C-1 of the 2C genes, and two children, which must both satisfy Eq. 10.
  Each of the N_ct tries draws a new pair and a new cut. If all fail, the children are mutations of the last pair, one of each.
  Both children are evaluated, and `tell` keeps the fitter (the first of equals).
- Algorithm 1 returns the best of S_T, which it never evaluates. Here the last generation is evaluated, too, and the result is
  `state.best_solution`, the best individual of all.

Letters: C = d + 1 control points, L layers, P population; N_ps, N_pa, N_mu, N_cr, N_ct as in Table 12.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from evosax.algorithms.population_based.base import Params as BaseParams
from evosax.algorithms.population_based.base import PopulationBasedAlgorithm, metrics_fn
from evosax.algorithms.population_based.base import State as BaseState
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.search.lattice import Lattice, max_changes, steps
from lpes_jax.settings.search import GeneticSettings

INITIAL, MUTATION, CROSSOVER, FAILED_CROSSOVER = range(4)  # Lineage.operator; the last: a mutation, as no try was valid
MUTATION_DRAWS = 64


# Fields below are Any because JAX rebuilds pytrees with tracers and placeholders instead of arrays.


@struct.dataclass
class Lineage:
    """The origin of each candidate. Ids count all evaluated individuals, from generation 0 on.

    `parents` is (parent, -1) for a mutation. For a child of a crossover it is (parent of the genes before `cut`, parent of the
    genes from `cut` on). -1 means none, also as `cut`.
    """

    ids: Any  # Int[Array, "P"]
    operator: Any  # Int[Array, "P"]: INITIAL, MUTATION, CROSSOVER or FAILED_CROSSOVER
    parents: Any  # Int[Array, "P 2"]
    cut: Any  # Int[Array, "P"], an index into the n C genes


@struct.dataclass
class State(BaseState):
    """The parents, fittest first, and the lineage of the candidates of the last `ask`. The other fields are evosax's."""

    population: Any  # Float[Array, "N_pa n C"]
    fitness: Any  # Float[Array, "N_pa"], to be minimised
    ids: Any  # Int[Array, "N_pa"]
    lineage: Any  # Lineage
    best_fitness: Any
    generation_counter: Any


@struct.dataclass
class Params(BaseParams):
    """Traced parameters. The last three are for x and y, in genes: codes on a lattice axis, values on a continuous one."""

    mutation_rate: Any  # Float[Array, ""]
    low: Any  # Float[Array, "2"]
    high: Any  # Float[Array, "2"]
    max_change: Any  # Float[Array, "2"], M_x and M_y


class PaperGA(PopulationBasedAlgorithm):
    """The paper's constrained genetic algorithm (Algorithm 1). `ask` returns `population_size` = N_mu + 2 N_cr individuals."""

    def __init__(self, lattice: Lattice, settings: GeneticSettings, metrics_fn=metrics_fn):
        self.lattice, self.settings, self.max_changes = lattice, settings, max_changes(settings, lattice)
        solution = jnp.zeros((lattice.control_points, len(lattice.axes)))
        super().__init__(settings.mutations + 2 * settings.crossovers, solution, metrics_fn=metrics_fn)
        self.on_lattice = tuple(step > 0 for _, _, step in lattice.axes)

    def __eq__(self, other: object) -> bool:
        """Equal ones share their compiled programs."""
        return type(other) is PaperGA and (self.lattice, self.settings) == (other.lattice, other.settings)

    def __hash__(self) -> int:
        return hash((self.lattice, self.settings))

    @property
    def _default_params(self) -> Params:
        bounds = [
            (0, steps(high, low, step), steps(change, 0.0, step) // 1) if step else (low, high, change)
            for (low, high, step), change in zip(self.lattice.axes, self.max_changes, strict=True)
        ]
        return Params(self.settings.mutation_rate, *jnp.array(bounds, jnp.float32).T)

    def control_points(self, genes: Float[Array | np.ndarray, "*population C n"]) -> Float[Array, "*population C n"]:
        """The control points that genes encode (x in layers, y the factor), float32. Traceable."""
        codes, tables = genes.astype(jnp.int32), self.lattice.lattices
        axes = [genes[..., i] if t is None else jnp.asarray(t, jnp.float32)[codes[..., i]] for i, t in enumerate(tables)]
        return jnp.stack(axes, axis=-1)

    def recorded_points(self, genes: Float[Array | np.ndarray, "*population C n"]) -> Float[np.ndarray, "*population C n"]:
        """The control points for records, float64 on the host: a lattice value is the decimal, 1.1 and not 1.1000000238."""
        points = np.array(genes, np.float64)
        for i, (table, (low, high, _)) in enumerate(zip(self.lattice.lattices, self.lattice.axes, strict=True)):
            points[..., i] = np.clip(points[..., i], low, high) if table is None else table[points[..., i].astype(int)]
        return points

    @partial(jax.jit, static_argnames=("self",))
    def initial_population(self, key: jax.Array, params: Params) -> tuple[Float[Array, "P C n"], Lineage]:
        """Genes of generation 0, for `init`: Eq. 8 first (operator INITIAL), then its mutations, N_ps in all."""
        size = self.settings.population_size
        first = jnp.asarray(self.lattice.initial_genes)
        mutants = jax.vmap(lambda key: mutation(key, first, params, self.on_lattice))(jax.random.split(key, size - 1))
        ids = jnp.arange(size, dtype=jnp.int32)
        parents = jnp.stack([jnp.where(ids == 0, -1, 0), jnp.full_like(ids, -1)], axis=1)
        lineage = Lineage(ids, jnp.where(ids == 0, INITIAL, MUTATION), parents, jnp.full_like(ids, -1))
        return jnp.concatenate([first[None], mutants]), lineage

    @partial(jax.jit, static_argnames=("self",))
    def init(self, key: jax.Array, population: Float[Array, "P C n"], fitness: Float[Array, "P"], params: Params) -> State:
        """evosax's `init` with the evaluated generation 0, in the order of `initial_population`; then the first selection."""
        state = super().init(key, population, fitness, params)
        return self._select(state, state.population, state.fitness, jnp.arange(len(fitness), dtype=jnp.int32))

    def _init(self, key: jax.Array, params: Params) -> State:
        none = jnp.full((self.population_size,), -1, jnp.int32)
        return State(
            population=jnp.full((self.settings.parents, self.num_dims), jnp.nan),
            fitness=jnp.full((self.settings.parents,), jnp.inf),
            ids=jnp.full((self.settings.parents,), -1, jnp.int32),
            lineage=Lineage(none, none, jnp.stack([none, none], axis=1), none),
            best_solution=jnp.full((self.num_dims,), jnp.nan),
            best_fitness=jnp.inf,
            generation_counter=0,
        )

    def _ask(self, key: jax.Array, state: State, params: Params) -> tuple[Float[Array, "P genes"], State]:
        s = self.settings
        parents = state.population.reshape(s.parents, self.lattice.control_points, -1)
        pool = jnp.sum(~jnp.isnan(state.fitness))  # NaN is last, so the first `pool` parents are fit to breed
        pool = jnp.where(pool == 0, s.parents, pool)

        key_parents, key_mutation, key_crossover = jax.random.split(key, 3)
        cross = jax.vmap(partial(crossover, parents=parents, pool=jnp.maximum(pool, 2), tries=s.crossover_tries))
        children, pairs, cut, valid = cross(jax.random.split(key_crossover, s.crossovers))
        pairs = jnp.stack([pairs, pairs[:, ::-1]], axis=1).reshape(-1, 2)  # the second child begins as the second parent
        cut, valid = jnp.repeat(cut, 2), jnp.repeat(valid, 2)

        first = jnp.concatenate([_draw(jax.random.uniform(key_parents, (s.mutations,)), pool), pairs[:, 0]])
        mutate = jax.vmap(partial(mutation, params=params, on_lattice=self.on_lattice))
        mutants = mutate(jax.random.split(key_mutation, self.population_size), parents[first])
        children = jnp.where(valid[:, None, None], children.reshape(-1, *parents.shape[1:]), mutants[s.mutations :])
        population = jnp.concatenate([mutants[: s.mutations], children])

        none = jnp.full((s.mutations,), -1, jnp.int32)
        second = jnp.where(valid, state.ids[pairs[:, 1]], -1)
        ids = s.population_size + self.population_size * state.generation_counter
        lineage = Lineage(
            ids=ids + jnp.arange(self.population_size, dtype=jnp.int32),
            operator=jnp.concatenate([jnp.full_like(none, MUTATION), jnp.where(valid, CROSSOVER, FAILED_CROSSOVER)]),
            parents=jnp.stack([state.ids[first], jnp.concatenate([none, second])], axis=1),
            cut=jnp.concatenate([none, jnp.where(valid, cut, -1)]),
        )
        return population.reshape(self.population_size, self.num_dims), state.replace(lineage=lineage)

    def _tell(
        self, key: jax.Array, population: Float[Array, "P genes"], fitness: Float[Array, "P"], state: State, params: Params
    ) -> State:
        mutants = self.settings.mutations
        fitter = jnp.argsort(fitness[mutants:].reshape(-1, 2), axis=1)[:, 0]  # stable, NaN last
        kept = jnp.concatenate([jnp.arange(mutants), mutants + 2 * jnp.arange(self.settings.crossovers) + fitter])
        return self._select(  # S_i = S_pa + S_mu + S_cr, in the order of evaluation
            state,
            jnp.concatenate([state.population, population[kept]]),
            jnp.concatenate([state.fitness, fitness[kept]]),
            jnp.concatenate([state.ids, state.lineage.ids[kept]]),
        )

    def _select(
        self, state: State, population: Float[Array, "P genes"], fitness: Float[Array, "P"], ids: Int[Array, "P"]
    ) -> State:
        best = jnp.argsort(fitness)[: self.settings.parents]  # stable, NaN last
        return state.replace(population=population[best], fitness=fitness[best], ids=ids[best])


def is_valid(genes: Float[Array, "*any C n"]) -> Bool[Array, "*any"]:
    """Eq. 10: x strictly increasing. (Its bounds hold by Eq. 9 and by the parents of a crossover.)"""
    return jnp.all(jnp.diff(genes[..., 0]) > 0, axis=-1)


def mutation(
    key: jax.Array, parent: Float[Array, "C axes"], params: Params, on_lattice: tuple[bool, ...]
) -> Float[Array, "C axes"]:
    """Eq. 9 and 10: the first valid of 64 draws, or else the parent's x with the first draw's y. `on_lattice`: each axis."""
    x, axes = parent[:, 0], parent.shape[1]
    learnt = range(1, axes)
    below = jnp.stack([jnp.append(params.low[0], x[:-1]), *(jnp.full_like(x, params.low[axis]) for axis in learnt)], axis=1)
    above = jnp.stack([jnp.append(x[1:], params.high[0]), *(jnp.full_like(x, params.high[axis]) for axis in learnt)], axis=1)
    low, high = jnp.maximum(below, parent - params.max_change), jnp.minimum(above, parent + params.max_change)

    uniform = _uniform(key, MUTATION_DRAWS, len(parent), axes + 1)  # for x, y, and whether the point is redrawn
    whole = jnp.array(on_lattice)
    offset = uniform[..., :axes] * (high - low + whole.astype(low.dtype))  # codes: 0 .. high - low
    draws = jnp.minimum(low + jnp.where(whole, jnp.floor(offset), offset), high)
    draws = jnp.where(uniform[..., axes:] < params.mutation_rate, draws, parent)

    valid = is_valid(draws)
    return jnp.where(jnp.any(valid), draws[jnp.argmax(valid)], draws[0].at[:, 0].set(x))


def crossover(
    key: jax.Array, parents: Float[Array, "parents C axes"], pool: Int[Array, ""], tries: int
) -> tuple[Float[Array, "2 C axes"], Int[Array, "2"], Int[Array, ""], Bool[Array, ""]]:
    """One-point crossover of two of the first `pool` parents: the first try whose children both satisfy Eq. 10, else the last.

    Returns the children, the rows of their first parents, the cut, and whether the children are valid.
    """
    flat = parents.reshape(len(parents), -1)
    uniform = _uniform(key, 3, tries)
    first = _draw(uniform[0], pool)
    second = (first + 1 + _draw(uniform[1], pool - 1)) % pool
    cut = 1 + _draw(uniform[2], flat.shape[1] - 1)
    pairs = jnp.stack([first, second], axis=1)
    genes, before = flat[pairs], jnp.arange(flat.shape[1]) < cut[:, None, None]
    children = jnp.where(before, genes, genes[:, ::-1]).reshape(tries, 2, *parents.shape[1:])
    valid = jnp.all(is_valid(children), axis=1)
    chosen = jnp.where(jnp.any(valid), jnp.argmax(valid), tries - 1)
    return children[chosen], pairs[chosen], cut[chosen], valid[chosen]


def _uniform(key: jax.Array, *shape: int) -> Float[Array, "..."]:
    return jax.random.uniform(key, (math.prod(shape),)).reshape(shape)  # compiles four times faster than in the shape itself


def _draw(uniform: Float[Array, "*any"], count: Int[Array, ""] | int) -> Int[Array, "*any"]:
    # 0 .. count - 1 from [0, 1): in float32 the product stays below any count under 2^23.
    return jnp.floor(uniform * jnp.asarray(count, uniform.dtype)).astype(jnp.int32)
