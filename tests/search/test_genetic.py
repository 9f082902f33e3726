"""The paper's genetic algorithm: every candidate against its recorded parents, and selection with chosen fitness."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from selection import drawn, mostly_long

from lpes_jax.errors import UserError
from lpes_jax.search.genetic import (
    CROSSOVER,
    FAILED_CROSSOVER,
    INITIAL,
    MUTATION,
    PaperGA,
    crossover,
    mutation,
)
from lpes_jax.search.lattice import Lattice
from lpes_jax.settings.search import preset

pytestmark = pytest.mark.promotes  # evosax's own ask and tell promote dtypes
KEY = jax.random.key(0)
TARGET = np.array([[3, 1.1], [9, 1.9], [15, 1.3], [28, 1.0]])


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all of the time here is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def paper_ga(num_layers=32, control_points=4, **changes):
    """With the paper's settings, and changes."""
    settings = preset("paper", **changes)
    return PaperGA(Lattice(num_layers, control_points, settings.space), settings.ga)


def lattice(*sizes, **changes):
    return paper_ga(*sizes, **changes).lattice


@cache
def make(num_layers=32, **changes):
    """An algorithm (compiled once for all tests that share it) and its parameters."""
    ga = paper_ga(num_layers, **changes)
    return ga, ga.default_params


@partial(jax.jit, static_argnums=3)  # compiled once for as many parents of as many points
def draw(keys, parents, params, on_lattice):
    return jax.vmap(lambda key, parent: mutation(key, parent, params, on_lattice))(keys, parents)


def mutants_of(parents, ga, params):
    keys = jax.random.split(KEY, len(parents))
    return np.asarray(draw(keys, jnp.asarray(parents, jnp.float32), params, ga.on_lattice))


def check_mutants(mutants, parents, num_layers=32, change=(2, 2), codes=11):
    """Eq. 9 and 10 in plain numpy, genes as codes of the default lattice."""
    assert mutants.shape == parents.shape
    assert (mutants == np.round(mutants)).all()
    assert (np.diff(mutants[..., 0]) > 0).all()
    assert (abs(mutants - parents) <= np.array(change)).all()
    assert (mutants[:, 1:, 0] >= parents[:, :-1, 0]).all() and (mutants[:, :-1, 0] <= parents[:, 1:, 0]).all()
    assert mutants[..., 0].min() >= 0 and mutants[..., 0].max() <= num_layers - 1
    assert mutants[..., 1].min() >= 0 and mutants[..., 1].max() <= codes - 1


def random_individuals(count, num_layers=32, points=4, codes=11, seed=0):
    rng = np.random.default_rng(seed)
    x = np.sort(np.argsort(rng.random((count, num_layers)))[:, :points])
    return np.stack([x, rng.integers(0, codes, (count, points))], axis=-1).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def loss(ga, genes):
    return jnp.sum((ga.control_points(genes) - TARGET) ** 2 * jnp.array([0.01, 1.0]), (-1, -2))


def start(ga, params, key=KEY, fitness=loss):
    population, _ = ga.initial_population(key, params)
    return population, ga.init(key, population, fitness(ga, population), params)


# --- the space and the start


def test_start_is_equation_8_on_the_lattice():
    ga, params = make()
    population, lineage = ga.initial_population(KEY, params)
    assert population.shape == (32, 4, 2)
    np.testing.assert_array_equal(ga.recorded_points(population[0]), [[value, 1.5] for value in (0, 10, 21, 31)])
    check_mutants(np.asarray(population[1:]), np.repeat(population[:1], 31, axis=0))
    assert lineage.ids.tolist() == list(range(32)) and set(lineage.cut.tolist()) == {-1}
    assert lineage.operator.tolist() == [INITIAL] + [MUTATION] * 31
    assert lineage.parents.tolist() == [[-1, -1]] + [[0, -1]] * 31


def test_start_rounds_half_to_even():
    assert lattice(30).initial_genes[:, 0].tolist() == [0, 10, 19, 29]  # 9.67, 19.33
    assert lattice(6, 3).initial_genes[:, 0].tolist() == [0, 2, 5]  # 2.5
    assert lattice(8, 3).initial_genes[:, 0].tolist() == [0, 4, 7]  # 3.5


def test_search_space_is_appendix_b():
    space = lattice(32).search_space()
    assert space == {"paper": 352**4, "valid": math.comb(32, 4) * 11**4, "brute_force": 11**32}
    assert lattice(32, x_step=0.0).search_space() == {"paper": None, "valid": None, "brute_force": 11**32}
    assert set(lattice(32, y_step=0.0).search_space().values()) == {None}


def test_lattice_values_are_the_decimals():
    ga, _ = make()
    genes = np.stack([np.arange(11) * 3, np.arange(11)], axis=1).astype(np.float32)
    points = ga.recorded_points(genes)
    assert points.dtype == np.float64
    assert points[:, 1].tolist() == [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
    assert points[:, 0].tolist() == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    np.testing.assert_array_equal(jax.jit(ga.control_points)(genes), points.astype(np.float32))
    fine, params = make(32, x_step=0.05, y_step=0.025, min_factor=0.75, max_factor=1.3, initial_factor=1.3)
    assert fine.recorded_points(fine.lattice.initial_genes)[:, 1].tolist() == [1.3] * 4
    np.testing.assert_array_equal(fine.recorded_points(fine.lattice.initial_genes)[:, 0], [0, 10.35, 20.65, 31])
    assert params.high.tolist() == [620, 22] and params.max_change.tolist() == [40, 8]


# --- mutation, Eq. 9


def test_mutants_of_the_most_crowded_points():
    ga, params = make()
    parents = np.tile(np.array([[0, 0], [1, 3], [2, 7], [3, 10]], np.float32), (4000, 1, 1))
    mutants = mutants_of(parents, ga, params)
    check_mutants(mutants, parents)
    assert set(mutants[:, 3, 0]) == {3, 4, 5}  # P_d may go to 2, its neighbour, but Eq. 10 leaves no room for the others then
    assert [set(mutants[:, k, 1]) for k in range(4)] == [{0, 1, 2}, {1, 2, 3, 4, 5}, {5, 6, 7, 8, 9}, {8, 9, 10}]


def test_mutants_of_random_parents():
    ga, params = make()
    parents = random_individuals(4000)
    mutants = mutants_of(parents, ga, params)
    check_mutants(mutants, parents)
    assert set(ga.recorded_points(mutants)[..., 1].ravel()) == {1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0}


def test_draws_are_uniform_over_the_closed_range():
    ga, params = make()
    parents = np.tile(np.array([[0, 0], [10, 5], [20, 5], [31, 10]], np.float32), (4000, 1, 1))
    mutants = mutants_of(parents, ga, params)
    expected = {(0, 0): [0, 1, 2], (0, 1): [0, 1, 2], (1, 0): [8, 9, 10, 11, 12], (2, 1): [3, 4, 5, 6, 7], (3, 0): [29, 30, 31]}
    for gene, values in expected.items():
        found, counts = np.unique(mutants[:, *gene], return_counts=True)
        assert found.tolist() == values
        share = 1 / len(values)
        assert abs(counts / 4000 - share).max() < 5 * (share * (1 - share) / 4000) ** 0.5


def test_mutation_rate_leaves_points_alone_and_is_traced():
    ga, params = make()
    parents = np.tile(np.array([[0, 5], [10, 5], [20, 5], [31, 5]], np.float32), (4000, 1, 1))
    moved = (mutants_of(parents, ga, params.replace(mutation_rate=0.4)) != parents).any(axis=-1)
    assert abs(moved[:, 1].mean() - 0.4 * 24 / 25) < 0.04  # 1 of 25 draws is the point itself
    assert (mutants_of(parents, ga, params.replace(mutation_rate=0.0)) == parents).all()


def test_where_no_draw_is_valid_x_stays_and_y_moves():
    ga, params = make(16, control_points=16)  # x can only be 0..15, and 64 draws will not find it
    parents = random_individuals(200, 16, 16)
    mutants = mutants_of(parents, ga, params)
    check_mutants(mutants, parents, 16)
    assert (mutants[..., 0] == np.arange(16)).all()
    assert (mutants[..., 1] != parents[..., 1]).mean() > 0.7


@pytest.mark.parametrize("x_step", mostly_long([1.0, 0.0], 1.0))
def test_pinned_x(x_step):
    ga, params = make(32, control_points=32, max_change_x=0.0, x_step=x_step)
    population, state = start(ga, params, fitness=lambda ga, genes: jnp.sum(genes[..., 1], axis=-1))
    candidates, state = ga.ask(KEY, state, params)
    for genes in (population, candidates):
        assert (np.asarray(genes)[..., 0] == np.arange(32)).all()
        assert len(np.unique(np.asarray(genes)[..., 1])) > 3
    assert set(state.lineage.operator.tolist()) == {MUTATION, CROSSOVER}


def test_continuous_axes_stay_in_their_ranges():
    ga, params = make(32, x_step=0.0, y_step=0.0, max_factor=1.7)
    assert ga.lattice.initial_genes[1].tolist() == pytest.approx([31 / 3, 1.5])
    parents = random_individuals(5000)
    parents[..., 1] = 1 + 0.07 * parents[..., 1]
    mutants = mutants_of(parents, ga, params)
    assert (np.diff(mutants[..., 0]) > 0).all() and mutants[..., 0].min() >= 0 and mutants[..., 0].max() <= 31
    assert (mutants[:, 1:, 0] >= parents[:, :-1, 0]).all() and (mutants[:, :-1, 0] <= parents[:, 1:, 0]).all()
    assert (abs(mutants - parents) <= np.array([2, 0.2]) + 1e-5).all()
    assert len(np.unique(mutants)) > 30_000
    points = ga.recorded_points(mutants)
    assert points[..., 1].min() >= 1 and points[..., 1].max() <= 1.7
    np.testing.assert_array_equal(ga.control_points(jnp.asarray(mutants)), mutants)


# --- crossover


def test_children_are_segments_of_their_parents():
    ga, params = make(32, population_size=40, crossovers=300, mutations=2)
    population, state = start(ga, params)
    candidates, state = ga.ask(KEY, state, params)
    genes = {number: row for number, row in enumerate(np.asarray(population).reshape(40, 8))}
    lineage = jax.tree.map(np.asarray, state.lineage)
    assert lineage.ids.tolist() == list(range(40, 40 + 602))
    assert lineage.operator[:2].tolist() == [MUTATION] * 2
    children, crossed = np.asarray(candidates).reshape(-1, 8), lineage.operator == CROSSOVER
    for i in np.flatnonzero(crossed):
        (first, second), cut = lineage.parents[i], lineage.cut[i]
        assert first != second and {first, second} <= set(state.ids.tolist())
        assert children[i].tolist() == [*genes[first][:cut], *genes[second][cut:]]
    pairs = lineage.parents[2:][crossed[2:]].reshape(-1, 2, 2)
    assert len(pairs) > 200 and (pairs[:, 0] == pairs[:, 1, ::-1]).all()  # both children, and both crossed
    assert set(lineage.cut[crossed]) == set(range(1, 8)) and set(pairs.ravel()) == set(state.ids.tolist())
    assert (np.diff(np.asarray(candidates)[..., 0]) > 0).all()


def test_exhausted_tries_fall_back_to_mutations_of_the_last_pair():
    ga, params = make(32, population_size=2, parents=2, crossovers=300, mutations=1, crossover_tries=1)
    far_apart = np.stack([[[0, 2], [1, 2], [2, 2], [3, 2]], [[28, 8], [29, 8], [30, 8], [31, 8]]]).astype(np.float32)
    state = ga.init(KEY, jnp.asarray(far_apart), jnp.zeros(2), params)
    candidates, state = ga.ask(KEY, state, params)
    lineage = jax.tree.map(lambda x: np.asarray(x)[1:], state.lineage)
    failed = lineage.operator == FAILED_CROSSOVER
    assert 0.75 < failed.mean() < 0.95  # 6 of the 7 cuts put 28 or more before 3 or less
    assert set(lineage.cut[failed]) == {-1} and set(lineage.cut[~failed]) == {7}
    assert set(lineage.parents[failed][:, 1]) == {-1}
    assert (np.sort(lineage.parents[failed][:, 0].reshape(-1, 2)) == [0, 1]).all()
    check_mutants(np.asarray(candidates)[1:][failed], far_apart[lineage.parents[failed][:, 0]])


def test_more_tries_find_a_valid_crossover():
    far_apart = jnp.array([[[0, 2], [1, 2], [2, 2], [3, 2]], [[28, 8], [29, 8], [30, 8], [31, 8]]], jnp.float32)
    keys = jax.random.split(KEY, 2000)
    for tries in (1, 16):
        *_, valid = jax.jit(jax.vmap(lambda key, tries=tries: crossover(key, far_apart, jnp.array(2), tries)))(keys)
        assert abs(float(valid.mean()) - (1 - (6 / 7) ** tries)) < 0.05


# --- selection


def test_select_parents_is_stable_and_keeps_the_best():
    ga, params = make()
    population, _ = ga.initial_population(KEY, params)
    fitness = jnp.array([5.0, 1.0] * 16)
    state = ga.init(KEY, population, fitness, params)
    assert state.ids.tolist() == list(range(1, 25, 2))  # ties: the one evaluated first
    np.testing.assert_array_equal(state.population.reshape(12, 4, 2), population[1:25:2])
    candidates, state = ga.ask(KEY, state, params)
    state, _ = ga.tell(KEY, candidates, jnp.ones(24), state, params)
    assert state.ids.tolist() == list(range(1, 25, 2))  # offspring that are as good do not displace a parent
    candidates, state = ga.ask(KEY, state, params)
    state, _ = ga.tell(KEY, candidates, jnp.full(24, 9.0).at[7].set(0.5), state, params)
    assert state.ids.tolist() == [32 + 24 + 7, *range(1, 23, 2)]
    np.testing.assert_array_equal(state.best_solution, candidates[7].ravel())
    assert float(state.best_fitness) == 0.5


def test_the_fitter_child_of_each_pair_is_kept():
    ga, params = make()
    _, state = start(ga, params, fitness=lambda ga, genes: jnp.full(len(genes), 50.0))
    candidates, state = ga.ask(KEY, state, params)
    children = [4.0, 3.0, 2.0, 2.0, jnp.nan, 6.0, 1.0, 0.0]  # a tie keeps the first, NaN loses
    fitness = jnp.array([99.0] * 16 + children)
    state, _ = ga.tell(KEY, candidates, fitness, state, params)
    first_child = 32 + 16
    assert state.ids[:4].tolist() == [first_child + 7, first_child + 2, first_child + 1, first_child + 5]
    assert state.fitness[:5].tolist() == [0.0, 2.0, 3.0, 6.0, 50.0]
    np.testing.assert_array_equal(state.population[1], candidates[16 + 2].ravel())


@pytest.mark.parametrize("finite", [0, 1, 3])
def test_nan_is_bred_from_only_where_nothing_else_is(finite):
    ga, params = make()
    population, _ = ga.initial_population(KEY, params)
    good = [30, 4, 17][:finite]
    fitness = jnp.full(32, jnp.nan).at[jnp.array(good, int)].set(jnp.inf if finite == 1 else 1.0)
    state = ga.init(KEY, population, fitness, params)
    assert state.ids[:finite].tolist() == sorted(good)
    candidates, state = ga.ask(KEY, state, params)
    mutated = set(state.lineage.parents[:16, 0].tolist())
    paired = set(state.lineage.parents[16:].ravel().tolist()) - {-1}
    if finite == 3:
        assert mutated == set(good) and paired <= set(good)
    elif finite == 1:
        assert mutated == set(good) and len(paired) == 2 and set(good) < paired
    else:
        assert len(mutated) > 3
    check_mutants(np.asarray(candidates)[:16], np.asarray(population)[np.asarray(state.lineage.parents[:16, 0])])
    fitness = jnp.full(24, jnp.nan).at[3].set(-1.0)
    state, _ = ga.tell(KEY, candidates, fitness, state, params)
    assert int(state.ids[0]) == 32 + 3 and float(state.best_fitness) == -1.0
    assert int(jnp.isnan(state.fitness).sum()) == 12 - finite - 1


# --- whole runs


def run(ga, params, key, generations=15):
    key, key_start = jax.random.split(key)
    _, state = start(ga, params, key_start)

    def generation(state, key):
        candidates, state = ga.ask(key, state, params)
        state, _ = ga.tell(key, candidates, loss(ga, candidates), state, params)
        return state, (state.best_fitness, state.fitness, candidates, state.lineage)

    return jax.lax.scan(generation, state, jax.random.split(key, generations))


def test_a_run_improves_never_loses_its_best_and_repeats():
    ga, params = make()
    compiled = jax.jit(lambda seed: run(ga, params, jax.random.key(seed)))
    state, (best, parents, candidates, lineage) = compiled(0)
    first = float(loss(ga, ga.lattice.initial_genes))
    assert float(best[-1]) < 0.35 * first
    assert (np.diff(best) <= 0).all() and (np.diff(parents, axis=0) <= 0).all() and (np.diff(parents, axis=1) >= 0).all()
    np.testing.assert_array_equal(best, parents[:, 0])
    np.testing.assert_array_equal(loss(ga, state.best_solution.reshape(4, 2)), state.best_fitness)
    assert lineage.ids.ravel().tolist() == list(range(32, 32 + 15 * 24))
    assert (np.asarray(lineage.parents) < np.asarray(lineage.ids)[..., None]).all()
    again, other = compiled(0), compiled(1)
    jax.tree.map(np.testing.assert_array_equal, again, (state, (best, parents, candidates, lineage)))
    assert not np.array_equal(other[1][2], candidates)


@pytest.mark.long
def test_scan_python_loop_and_vmap_over_seeds_agree():
    ga, params = make()
    keys = jax.random.split(KEY, 3)
    states, (best, *_) = jax.vmap(lambda key: run(ga, params, key))(keys)
    assert best.shape == (3, 15) and len(set(best[:, -1].tolist())) > 1

    key_run, key_start = jax.random.split(keys[1])
    _, state = start(ga, params, key_start)
    for key in jax.random.split(key_run, 15):
        candidates, state = ga.ask(key, state, params)
        state, metrics = ga.tell(key, candidates, loss(ga, candidates), state, params)
    np.testing.assert_array_equal(state.population, states.population[1])
    np.testing.assert_array_equal(state.ids, states.ids[1])
    assert float(metrics["best_fitness"]) == pytest.approx(float(best[1, -1])) and int(state.generation_counter) == 15


@pytest.mark.parametrize(("mutations", "crossovers", "parents"), mostly_long([(0, 3, 2), (5, 0, 1)], (0, 3, 2), names=3))
def test_a_single_operator(mutations, crossovers, parents):
    ga, params = make(12, population_size=2, mutations=mutations, crossovers=crossovers, parents=parents)
    _, state = start(ga, params)
    candidates, state = ga.ask(KEY, state, params)
    assert candidates.shape == (mutations + 2 * crossovers, 4, 2)
    state, _ = ga.tell(KEY, candidates, loss(ga, candidates), state, params)
    assert state.population.shape == (parents, 8)


@settings(max_examples=drawn(3), deadline=None, phases=[Phase.generate])  # an example is a compilation: no shrinking
@given(st.integers(4, 40), st.integers(2, 5), st.integers(2, 6), st.integers(0, 2**31 - 1))
def test_every_candidate_satisfies_equations_9_and_10(num_layers, points, parents, seed):
    points = min(points, num_layers)
    ga = paper_ga(num_layers, points, population_size=7, parents=parents, mutations=5, crossovers=2)
    params, key = ga.default_params, jax.random.key(seed)
    population, _ = ga.initial_population(key, params)
    state = ga.init(key, population, jnp.arange(7.0), params)
    genes = {number: row for number, row in enumerate(np.asarray(population))}
    for generation in range(2):
        candidates, state = ga.ask(jax.random.fold_in(key, generation), state, params)
        lineage, candidates = jax.tree.map(np.asarray, state.lineage), np.asarray(candidates)
        genes |= dict(zip(lineage.ids.tolist(), candidates, strict=True))
        mutated = lineage.operator != CROSSOVER
        check_mutants(candidates[mutated], np.stack([genes[i] for i in lineage.parents[mutated, 0]]), num_layers)
        for i in np.flatnonzero(~mutated):
            first, second = (genes[parent].ravel() for parent in lineage.parents[i])
            assert candidates[i].ravel().tolist() == [*first[: lineage.cut[i]], *second[lineage.cut[i] :]]
            assert (np.diff(candidates[i, :, 0]) > 0).all()
        state, _ = ga.tell(key, jnp.asarray(candidates), jnp.arange(9.0) - 9 * generation, state, params)


# --- mistakes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parents": 33}, ["--parents 33", "--population-size 32"]),
        ({"parents": 1}, ["--parents 1", "--crossovers 4"]),
        ({"parents": 0}, ["--parents"]),
        ({"population_size": 0}, ["--population-size"]),
        ({"mutations": -1}, ["--mutations"]),
        ({"crossovers": -1}, ["--crossovers"]),
        ({"mutations": 0, "crossovers": 0}, ["--mutations", "--crossovers"]),
        ({"crossover_tries": 0}, ["--crossover-tries"]),
        ({"control_points": 1}, ["--control-points"]),
        ({"control_points": 33}, ["--control-points 33", "32 layers"]),
        ({"num_layers": 3}, ["--control-points 4", "3 layers"]),
        ({"num_layers": 0}, ["--control-points 4", "0 layers"]),
        ({"num_layers": 1, "x_step": 0.0}, ["--control-points 4", "1 layers"]),
        ({"min_factor": 2.0}, ["--min-factor 2.0", "--max-factor 2.0"]),
        ({"min_factor": 0.0}, ["--min-factor 0.0", "above 0"]),
        ({"max_factor": 0.9}, ["--max-factor 0.9"]),
        ({"max_factor": math.inf}, ["--max-factor", "inf"]),
        ({"max_factor": 2.05}, ["--max-factor 2.05", "--y-step 0.1"]),
        ({"initial_factor": 2.1}, ["--initial-factor 2.1", "--max-factor 2.0"]),
        ({"initial_factor": 0.9}, ["--initial-factor 0.9", "--min-factor 1.0"]),
        ({"initial_factor": 1.55}, ["--initial-factor 1.55", "--y-step 0.1"]),
        ({"initial_factor": math.nan}, ["--initial-factor", "nan"]),
        ({"max_change_x": -1.0}, ["--max-change-x"]),
        ({"max_change_x": 0.5}, ["--max-change-x 0.5", "1.0"]),
        ({"max_change_y": 0.05}, ["--max-change-y 0.05", "0.1"]),
        ({"x_step": 2.0}, ["31", "--x-step 2.0"]),
        ({"y_step": -0.1}, ["--y-step"]),
        ({"y_step": 1e-9}, ["--y-step 1e-09"]),
        ({"y_step": 1e-300}, ["--y-step 1e-300"]),
        ({"mutation_rate": 0.0}, ["--mutation-rate"]),
        ({"mutation_rate": 1.1}, ["--mutation-rate"]),
    ],
)
def test_mistakes_are_named(changes, named):
    with pytest.raises(UserError) as error:
        paper_ga(**changes)
    message = str(error.value)
    assert "\n" not in message and all(name in message for name in named), message
