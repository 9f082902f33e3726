"""Curves against published values, float64 bisection and float64 finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import mostly_long

from lpes_jax.curves import CURVES, authors, bezier, bezier_outline, free, linear, step

# The authors' control points for Vicuna-7B on MDQA, and the factors of 30 layers: by their code, and by the paper's Eq. 5, 6.
VICUNA = [[4.7, 1.2], [10, 1.35], [19.7, 1.75], [28.8, 1.5]]
BY_THEIR_CODE = [
    1.5, 1.524, 1.543, 1.558, 1.569, 1.576, 1.58, 1.58, 1.577, 1.572, 1.564, 1.553, 1.54, 1.525, 1.509, 1.491, 1.471, 1.451,
    1.429, 1.407, 1.385, 1.362, 1.34, 1.317, 1.295, 1.274, 1.254, 1.234, 1.216, 1.2,
]  # fmt: skip
BY_THE_PAPER = [
    1.2, 1.224, 1.25, 1.276, 1.302, 1.328, 1.353, 1.378, 1.402, 1.425, 1.446, 1.467, 1.486, 1.504, 1.52, 1.534, 1.547, 1.558,
    1.566, 1.573, 1.578, 1.58, 1.58, 1.577, 1.572, 1.564, 1.553, 1.539, 1.521, 1.5,
]  # fmt: skip


def points_of(x, y) -> jax.Array:
    return jnp.stack([jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)], axis=-1)


def exact_bezier(points: np.ndarray, num_layers: int) -> np.ndarray:
    """Cubic only: Eq. 3-6 in float64, t by a hundred halvings."""
    (x0, x1, x2, x3), y = points.T

    def blend(t, p0, p1, p2, p3):
        return (1 - t) ** 3 * p0 + 3 * t * (1 - t) ** 2 * p1 + 3 * t**2 * (1 - t) * p2 + t**3 * p3

    factors = []
    for layer in range(num_layers):
        target = x0 + (x3 - x0) * layer / (num_layers - 1)
        low, high = 0.0, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if blend(middle, x0, x1, x2, x3) < target else (low, middle)
        factors.append(blend((low + high) / 2, *y))
    return np.array(factors)


@st.composite
def genomes(draw, num_layers: int = 32) -> np.ndarray:
    """Four control points on the paper's lattice: x strictly increasing whole numbers, y in steps of 0.1 from 1 to 2."""
    x = sorted(draw(st.lists(st.integers(0, num_layers - 1), min_size=4, max_size=4, unique=True)))
    y = draw(st.lists(st.integers(10, 20), min_size=4, max_size=4))
    return np.stack([np.array(x, np.float64), np.array(y) / 10], axis=-1)


bezier_of_32 = jax.jit(partial(bezier, num_layers=32))


def test_published_factors():
    points = jnp.array(VICUNA)
    np.testing.assert_allclose(authors(points, 30), BY_THEIR_CODE, atol=5.1e-4)
    np.testing.assert_allclose(bezier(points, 30), BY_THE_PAPER, atol=5.1e-4)
    assert float(authors(points, 30).mean()) == pytest.approx(1.4466, abs=5e-5)
    assert float(bezier(points, 30).mean()) == pytest.approx(1.4634, abs=5e-5)
    kv = points.at[:, 1].set(jnp.array([1.0, 1.1, 1.35, 1.2]))
    assert float(authors(kv, 30).mean()) == pytest.approx(1.1603, abs=5e-5)
    assert float(bezier(kv, 30).mean()) == pytest.approx(1.1713, abs=5e-5)


def test_four_layers_known_answer():
    factors = bezier(points_of([0, 1, 2, 3], [1, 1, 2, 2]), 4)
    np.testing.assert_allclose(factors, [1, 1.25925926, 1.74074074, 2], rtol=3e-7)


@pytest.mark.parametrize("x", [(0, 2, 9, 31), (4, 5, 8.5, 19.5)])  # the second is the first, shrunk and moved
def test_thirty_two_layers_known_answer(x):
    factors = np.asarray(bezier(points_of(x, [1, 2, 1, 1.5]), 32))
    np.testing.assert_allclose(factors[[0, 1, 5, 10, 20, 31]], [1, 1.287449, 1.465641, 1.410681, 1.353390, 1.5], atol=1.5e-6)


@settings(max_examples=60, deadline=None)
@given(genomes())
def test_bezier_equals_float64_bisection(genome):
    factors = np.asarray(bezier_of_32(jnp.asarray(genome, jnp.float32)))
    np.testing.assert_allclose(factors, exact_bezier(genome, 32), rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(genomes())
def test_ends_are_exact_and_factors_stay_between_the_control_points(genome):
    factors = np.asarray(bezier_of_32(jnp.asarray(genome, jnp.float32)))
    y = genome[:, 1].astype(np.float32)
    assert factors[0] == y[0] and factors[-1] == y[-1]
    assert factors.min() >= y.min() - 3e-7 and factors.max() <= y.max() + 3e-7  # a unit or two of rounding


def test_extreme_control_points():
    for x in ([0, 1, 2, 31], [0, 29, 30, 31], [0, 1, 30, 31], [0, 1e-3, 2e-3, 31], [0, 30.999, 30.9995, 31]):
        points = points_of(x, [1, 2, 1, 2])
        np.testing.assert_allclose(bezier_of_32(points), exact_bezier(np.asarray(points, np.float64), 32), rtol=0, atol=3e-6)


def test_reversed_equally_spaced_points_are_the_authors_map():
    y = jnp.array([1.2, 1.9, 1.0, 1.55])
    ours = bezier(points_of([0, 10, 20, 30], y[::-1]), 31)
    np.testing.assert_allclose(ours, authors(points_of([4.7, 10, 19.7, 28.8], y), 31), rtol=0, atol=5e-7)


XS = [(0, 10, 20, 31), (0, 1, 2, 31), (0, 29, 30, 31), (3, 4, 27, 28), (0, 15, 16, 31), (0, 0.2, 9, 31)]


@pytest.mark.parametrize("x", mostly_long(XS, XS[3], XS[5]))
def test_gradients_equal_finite_differences(x):
    with jax.enable_x64(True):
        points = jnp.asarray(np.stack([x, [1.2, 1.9, 1.1, 1.5]], axis=-1), jnp.float64)
        assert points.dtype == jnp.float64
        curve_of_12 = jax.jit(partial(bezier, num_layers=12))
        jacobian = np.asarray(jax.jit(jax.jacrev(curve_of_12))(points))
        forward = np.asarray(jax.jit(jax.jacfwd(curve_of_12))(points))
        step = 1e-4 * 0.02  # of a fourth-order difference
        differences = np.zeros_like(jacobian)
        for index in np.ndindex(4, 2):
            moved = [np.asarray(curve_of_12(points.at[index].add(k * step))) for k in (-2, -1, 1, 2)]
            differences[:, *index] = (moved[0] - 8 * moved[1] + 8 * moved[2] - moved[3]) / (12 * step)
    assert np.isfinite(jacobian).all()
    np.testing.assert_allclose(jacobian, forward, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(jacobian, differences, rtol=1e-6, atol=1e-7 * np.abs(differences).max())


def test_float32_gradients_have_no_nan():
    gradient = jax.jit(jax.vmap(jax.grad(lambda points: bezier_of_32(points).sum())))
    x = jnp.array([[0, 1, 2, 31], [0, 29, 30, 31], [0, 10.333, 20.667, 31], [0, 1, 2, 3]], jnp.float32)
    population = jnp.stack([x, jnp.broadcast_to(jnp.array([1.0, 2.0, 1.0, 2.0]), (4, 4))], axis=-1)
    gradients = gradient(population)
    assert bool(jnp.isfinite(gradients).all())
    np.testing.assert_allclose(gradients[:, :, 1].sum(axis=1), 32, rtol=1e-5)  # the weights of the y's sum to 1 in every layer


@pytest.mark.parametrize("curve", mostly_long(["bezier", "linear", "step", "authors"], "bezier", "step"))
def test_jit_and_vmap_change_nothing(curve):
    population = jnp.array([VICUNA, [[0, 1], [2, 2], [9, 1], [29, 1.5]], [[0, 1.5], [10, 1.5], [20, 1.5], [29, 1.5]]])
    curve_of_30 = partial(CURVES[curve], num_layers=30)
    together = jax.jit(jax.vmap(curve_of_30))(population)
    assert together.shape == (3, 30)
    for points, row in zip(population, together, strict=True):
        np.testing.assert_allclose(curve_of_30(points), row, rtol=0, atol=3e-7)
    np.testing.assert_array_equal(np.asarray(together)[2].round(6), 1.5)


def test_linear_known_answer():
    factors = linear(points_of([0, 2, 8], [1, 2, 1.5]), 9)
    np.testing.assert_allclose(factors, [1, 1.5, 2, 1.9166667, 1.8333333, 1.75, 1.6666667, 1.5833333, 1.5], rtol=1e-6)
    # Eq. 6: the layers spread over the control points' own x's, not over 0 to L - 1.
    np.testing.assert_allclose(linear(points_of([4, 6, 12], [1, 2, 1.5]), 5), [1, 2, 1.8333333, 1.6666667, 1.5], rtol=1e-6)


def test_step_known_answer():
    factors = step(points_of([0, 2, 8], [1, 2, 1.5]), 9)
    np.testing.assert_array_equal(factors, np.array([1, 2, 2, 2, 2, 1.5, 1.5, 1.5, 1.5], np.float32))  # halfway: the later


def test_free_is_its_own_values():
    points = points_of([9, 5, 7], [1.1, 2.5, 0.9])
    np.testing.assert_array_equal(free(points, 3), points[:, 1])
    with pytest.raises(ValueError, match="needs one control point per layer: 4, got 3"):
        free(points, 4)


@pytest.mark.parametrize("curve, wanted", [("bezier", 1.2), ("linear", 1.2), ("step", 1.2), ("authors", 1.5)])
def test_one_layer(curve, wanted):
    factors = CURVES[curve](jnp.array(VICUNA), 1)
    np.testing.assert_array_equal(factors, np.array([wanted], np.float32))


def test_two_control_points_are_a_line():
    np.testing.assert_allclose(bezier(points_of([0, 4], [1, 2]), 5), [1, 1.25, 1.5, 1.75, 2], rtol=3e-7)


def test_outline_passes_through_the_layers():
    outline = np.asarray(bezier_outline(jnp.array(VICUNA), 2001))
    np.testing.assert_array_equal(outline[[0, -1]], np.array(VICUNA, np.float32)[[0, -1]])
    layers = np.linspace(4.7, 28.8, 30)
    np.testing.assert_allclose(np.interp(layers, outline[:, 0], outline[:, 1]), bezier(jnp.array(VICUNA), 30), atol=1e-5)
