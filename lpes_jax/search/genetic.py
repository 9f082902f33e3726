"""The paper's genetic algorithm (section 3.2, Algorithm 1, Appendices B and E) as an evosax algorithm.

    ga = PaperGA(GeneticSettings(num_layers=32))
    params = ga.default_params
    population, lineage = ga.initial_population(key, params)           # generation 0, N_ps individuals
    state = ga.init(key, population, -fitness(ga.control_points(population)), params)
    for key in keys:                                                   # T generations, or jax.lax.scan
        population, state = ga.ask(key, state, params)                 # N_mu + 2 N_cr candidates; state.lineage: their origin
        state, metrics = ga.tell(key, population, -fitness(ga.control_points(population)), state, params)
    best = ga.control_points(state.best_solution.reshape(-1, 2))

evosax minimises, so it is told minus the fitness. Everything is jit-, vmap- and scan-able, and the key decides all.
What the paper leaves open is decided here:

- Genes are `[C, 2]`: (x, y) of every control point, float32. On a lattice (step > 0; Table 9: 1 and 0.1) they are integer
  codes, exact in float32: x = code * x_step, y = min_factor + code * y_step. On a continuous axis (step 0) they are the values.
- Eq. 8: k (L-1)/d is rounded to the lattice, half to even: 10 and 21 for L = 32. The rest of generation 0 are its mutations.
- Select-Parents: the N_pa fittest, ties to the one evaluated first. It happens at the end of `init` and `tell` instead of
  the start of `ask`, so the state holds the parents alone and has one size, whatever N_ps. Parents compete with their
  offspring, so the best stays. A NaN fitness sorts last and is not bred from while anything else is there.
- Mutation, Eq. 9: the parent is drawn uniformly; neighbours are the parent's, so all points move at once. A point is redrawn
  with probability `mutation_rate`, uniformly over its closed range. The whole is drawn anew until Eq. 10 holds, at most
  64 times; after that x stays the parent's. So `max_change_x = 0` pins x.
- Crossover: two different parents, one cut in 1 .. 2C-1 of the 2C genes, both children, and both must satisfy Eq. 10. Each of
  the N_ct tries draws a new pair and a new cut; after the last, the children are mutations of that pair, one of each.
  Both are evaluated and `tell` keeps the fitter (the first, if they tie).
- Algorithm 1 returns the best of S_T, which it never evaluated. Here the last generation is evaluated too and the answer is
  `state.best_solution`, the best of all that were.

Letters: C = d + 1 control points, L layers, P population; N_ps, N_pa, N_mu, N_cr, N_ct as in Table 12.
"""

import math
from dataclasses import dataclass
from decimal import Decimal
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

from lpes_jax.errors import UserError

INITIAL, MUTATION, CROSSOVER, FAILED_CROSSOVER = range(4)  # Lineage.operator; the last: a mutation, as no try was valid
MUTATION_DRAWS = 64
MAX_CODES = 65536  # values of one lattice axis: they are tabulated, and codes must be exact in float32


@dataclass(frozen=True)
class GeneticSettings:
    """The search space (Table 9) and the sizes (Table 12), with the paper's values. Raises UserError where they clash.

    `num_layers` counts the scaled layers; `initial_points` (x, y) replace the first individual of Eq. 8. Factors are without
    unit, x in layers. A step of 0 makes its axis continuous.
    """

    num_layers: int
    control_points: int = 4
    population_size: int = 32
    parents: int = 12
    mutations: int = 16
    crossovers: int = 4
    crossover_tries: int = 4
    max_change_x: float = 2.0
    max_change_y: float = 0.2
    min_factor: float = 1.0
    max_factor: float = 2.0
    initial_factor: float = 1.5
    x_step: float = 1.0
    y_step: float = 0.1
    mutation_rate: float = 1.0
    initial_points: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if name == "initial_points":
                continue
            least = {"control_points": 2, "population_size": 1, "parents": 1, "crossover_tries": 1}.get(name, 0)
            flag = "--" + name.replace("_", "-")
            _require(least <= value < math.inf, f"{flag} must be a number of at least {least}, got {value}")
        _require(0 < self.mutation_rate <= 1, f"--mutation-rate must be above 0 and at most 1, got {self.mutation_rate}")
        _require(self.mutations + self.crossovers > 0, "--mutations and --crossovers are both 0; give one of them")
        size, parents = f"--population-size {self.population_size}", f"--parents {self.parents}"
        _require(self.parents <= self.population_size, f"{parents} is more than {size}; lower it")
        enough = self.parents >= 2 or self.crossovers == 0
        _require(enough, f"{parents} is too few for --crossovers {self.crossovers}; give 2 or more")
        low, high, initial = self.min_factor, self.max_factor, self.initial_factor
        _require(0 < low < high, f"--min-factor {low} must be above 0 and below --max-factor {high}")
        _require(low <= initial <= high, f"--initial-factor {initial} is outside --min-factor {low} to --max-factor {high}")
        last = self.num_layers - 1.0
        for axis, step, name, value, origin in (
            ("x", self.x_step, f"the last layer, {last:g},", last, 0.0),
            ("y", self.y_step, f"--max-factor {high}", high, low),
            ("y", self.y_step, f"--initial-factor {initial}", initial, low),
        ):
            codes, way_out = _steps(value, origin, step), f"change it or give --{axis}-step 0 (continuous)"
            _require(codes < MAX_CODES, f"--{axis}-step {step} makes more than {MAX_CODES} values; {way_out}")
            _require(codes % 1 == 0, f"{name} is not on the lattice {origin} + k * --{axis}-step {step}; {way_out}")
        for axis, (_, _, step, change) in zip("xy", self.axes, strict=True):
            _require(change == 0 or change >= step, f"--max-change-{axis} {change} is below one step, {step}; 0 pins {axis}")
        places = math.inf if self.x_step == 0 and last > 0 else int(_steps(last, 0.0, self.x_step)) + 1
        crowd = f"{self.num_layers} layers have {places} values of x"
        fits = self.control_points <= places
        _require(fits, f"--control-points {self.control_points} cannot increase in x: {crowd}; give fewer")

    @property
    def axes(self) -> tuple[tuple[float, float, float, float], tuple[float, float, float, float]]:
        """Lowest and highest value, lattice step and M of x and of y."""
        x = 0.0, self.num_layers - 1.0, self.x_step, self.max_change_x
        return x, (self.min_factor, self.max_factor, self.y_step, self.max_change_y)

    @property
    def lattices(self) -> tuple[Float[np.ndarray, "X"] | None, Float[np.ndarray, "Y"] | None]:
        """The values of P^x (in layers) and of P^y, float64 (Table 9); None for an axis that is continuous."""
        x, y = (_lattice(low, high, step) for low, high, step, _ in self.axes)
        return x, y

    @property
    def initial_genes(self) -> Float[np.ndarray, "C 2"]:
        """Eq. 8: (k (L-1)/d, initial factor) for k = 0..d, x rounded to the lattice (half to even), as float32 genes.

        With `initial_points`, those, put on the lattice.
        """
        if self.initial_points is not None:
            return np.stack(
                [
                    np.clip(value, low, high) if table is None else np.abs(table[None] - value[:, None]).argmin(axis=1)
                    for value, table, (low, high, *_) in zip(
                        np.array(self.initial_points).T, self.lattices, self.axes, strict=True
                    )
                ],
                axis=1,
            ).astype(np.float32)
        (x_values, y_values), d = self.lattices, self.control_points - 1
        k = np.arange(d + 1)
        x = k * (self.num_layers - 1) / d if x_values is None else np.round(k * (len(x_values) - 1) / d)
        y = self.initial_factor if y_values is None else np.searchsorted(y_values, self.initial_factor)
        return np.stack([x, np.full(d + 1, y)], axis=1).astype(np.float32)

    def search_space(self) -> dict[str, int | None]:
        """Sizes (Appendix B): `paper` (|X| |Y|)^C, `valid` those in order (Eq. 10), `brute_force` |Y|^L; None if continuous."""
        x, y = (None if values is None else len(values) for values in self.lattices)
        return {
            "paper": x and y and (x * y) ** self.control_points,
            "valid": x and y and math.comb(x, self.control_points) * y**self.control_points,
            "brute_force": y and y**self.num_layers,
        }


# Fields below are Any because JAX rebuilds pytrees with tracers and placeholders in the place of arrays.


@struct.dataclass
class Lineage:
    """Where each candidate comes from; ids run over all that were evaluated, generation 0 first.

    `parents` is (parent, -1) for a mutation, and for a child of a crossover (whose genes it has before `cut`, whose from
    `cut` on); -1 is none, as is a `cut` of -1.
    """

    ids: Any  # Int[Array, "P"]
    operator: Any  # Int[Array, "P"]: INITIAL, MUTATION, CROSSOVER or FAILED_CROSSOVER
    parents: Any  # Int[Array, "P 2"]
    cut: Any  # Int[Array, "P"], an index into the 2C genes


@struct.dataclass
class State(BaseState):
    """The parents, fittest first, and where the candidates of the last `ask` come from. The rest is evosax's."""

    population: Any  # Float[Array, "N_pa 2C"]
    fitness: Any  # Float[Array, "N_pa"], to be minimised
    ids: Any  # Int[Array, "N_pa"]
    lineage: Any  # Lineage
    best_fitness: Any
    generation_counter: Any


@struct.dataclass
class Params(BaseParams):
    """Traced. The last three are for x and y and in genes: codes on a lattice axis, values on a continuous one."""

    mutation_rate: Any  # Float[Array, ""]
    low: Any  # Float[Array, "2"]
    high: Any  # Float[Array, "2"]
    max_change: Any  # Float[Array, "2"], M_x and M_y


class PaperGA(PopulationBasedAlgorithm):
    """The paper's constrained genetic algorithm (Algorithm 1). `population_size` is what `ask` returns: N_mu + 2 N_cr."""

    def __init__(self, settings: GeneticSettings, metrics_fn=metrics_fn):
        solution = jnp.zeros((settings.control_points, 2))
        super().__init__(settings.mutations + 2 * settings.crossovers, solution, metrics_fn=metrics_fn)
        self.settings = settings
        self.on_lattice = settings.x_step > 0, settings.y_step > 0

    @property
    def _default_params(self) -> Params:
        in_genes = [
            (0, _steps(high, low, step), _steps(change, 0.0, step) // 1) if step else (low, high, change)
            for low, high, step, change in self.settings.axes
        ]
        return Params(self.settings.mutation_rate, *jnp.array(in_genes, jnp.float32).T)

    def control_points(self, genes: Float[Array | np.ndarray, "*population C 2"]) -> Float[Array, "*population C 2"]:
        """The points that genes stand for (x in layers, y the factor), float32. Traceable."""
        codes, tables = genes.astype(jnp.int32), self.settings.lattices
        axes = [genes[..., i] if t is None else jnp.asarray(t, jnp.float32)[codes[..., i]] for i, t in enumerate(tables)]
        return jnp.stack(axes, axis=-1)

    def recorded_points(self, genes: Float[Array | np.ndarray, "*population C 2"]) -> Float[np.ndarray, "*population C 2"]:
        """The same for records, float64 on the host: a lattice value is the decimal itself, 1.1 and not 1.1000000238."""
        points = np.array(genes, np.float64)
        for i, (table, (low, high, *_)) in enumerate(zip(self.settings.lattices, self.settings.axes, strict=True)):
            points[..., i] = np.clip(points[..., i], low, high) if table is None else table[points[..., i].astype(int)]
        return points

    @partial(jax.jit, static_argnames=("self",))
    def initial_population(self, key: jax.Array, params: Params) -> tuple[Float[Array, "P C 2"], Lineage]:
        """Genes of generation 0: Eq. 8 first (operator INITIAL), then its mutations, N_ps in all. To be given to `init`."""
        size = self.settings.population_size
        first = jnp.asarray(self.settings.initial_genes)
        mutants = jax.vmap(lambda key: mutation(key, first, params, self.on_lattice))(jax.random.split(key, size - 1))
        ids = jnp.arange(size, dtype=jnp.int32)
        parents = jnp.stack([jnp.where(ids == 0, -1, 0), jnp.full_like(ids, -1)], axis=1)
        lineage = Lineage(ids, jnp.where(ids == 0, INITIAL, MUTATION), parents, jnp.full_like(ids, -1))
        return jnp.concatenate([first[None], mutants]), lineage

    @partial(jax.jit, static_argnames=("self",))
    def init(self, key: jax.Array, population: Float[Array, "P C 2"], fitness: Float[Array, "P"], params: Params) -> State:
        """evosax's `init` with generation 0, evaluated, in the order of `initial_population`; then the first selection."""
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
        parents = state.population.reshape(s.parents, s.control_points, 2)
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
        children = jnp.where(valid[:, None, None], children.reshape(-1, s.control_points, 2), mutants[s.mutations :])
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


def is_valid(genes: Float[Array, "*any C 2"]) -> Bool[Array, "*any"]:
    """Eq. 10: x strictly increasing. (Its bounds hold by Eq. 9 and by the parents of a crossover.)"""
    return jnp.all(jnp.diff(genes[..., 0]) > 0, axis=-1)


def mutation(key: jax.Array, parent: Float[Array, "C 2"], params: Params, on_lattice: tuple[bool, bool]) -> Float[Array, "C 2"]:
    """Eq. 9 and 10: the first valid of 64 draws, or the parent's x with the first draw's y. `on_lattice`: is x, is y."""
    x, y = parent.T
    below = jnp.stack([jnp.append(params.low[0], x[:-1]), jnp.full_like(y, params.low[1])], axis=1)
    above = jnp.stack([jnp.append(x[1:], params.high[0]), jnp.full_like(y, params.high[1])], axis=1)
    low, high = jnp.maximum(below, parent - params.max_change), jnp.minimum(above, parent + params.max_change)

    uniform = _uniform(key, MUTATION_DRAWS, len(parent), 3)  # for x, y, and whether the point is redrawn
    whole = jnp.array(on_lattice)
    offset = uniform[..., :2] * (high - low + whole.astype(low.dtype))  # codes: 0 .. high - low
    draws = jnp.minimum(low + jnp.where(whole, jnp.floor(offset), offset), high)
    draws = jnp.where(uniform[..., 2:] < params.mutation_rate, draws, parent)

    valid = is_valid(draws)
    return jnp.where(jnp.any(valid), draws[jnp.argmax(valid)], draws[0].at[:, 0].set(x))


def crossover(
    key: jax.Array, parents: Float[Array, "parents C 2"], pool: Int[Array, ""], tries: int
) -> tuple[Float[Array, "2 C 2"], Int[Array, "2"], Int[Array, ""], Bool[Array, ""]]:
    """One-point crossover of two of the first `pool` parents: the first try whose children both satisfy Eq. 10, else the last.

    Returns the children, the rows of the parents that they begin as, the cut, and whether they are valid.
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


def _require(met: bool, message: str) -> None:
    if not met:
        raise UserError(message)


def _steps(value: float, origin: float, step: float) -> Decimal:
    """(value - origin) / step in decimals, where 0.2 is exactly two steps of 0.1; 0 for no step."""
    return (Decimal(str(value)) - Decimal(str(origin))) / Decimal(str(step)) if step else Decimal(0)


def _lattice(low: float, high: float, step: float) -> Float[np.ndarray, "codes"] | None:
    if step == 0:
        return None
    codes = range(int(_steps(high, low, step)) + 1)
    return np.array([float(Decimal(str(low)) + code * Decimal(str(step))) for code in codes])
