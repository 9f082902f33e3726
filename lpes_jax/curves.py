"""Control points -> one factor per layer (paper, Eq. 3-6 and Appendix D), jit-able, vmap-able and differentiable.

Layer h of L has x_h = P_0x + (P_dx - P_0x) h / (L - 1)  (Eq. 6), and its factor is the curve's y at x_h (Eq. 5):

    bezier     the paper's Bézier curve; t(x_h) by bisection, differentiable in y and in x
    linear     straight lines between neighbouring control points
    step       the y of the control point nearest in x (the paper does not define its step function)
    free       one value per layer: control point h is layer h, x is ignored
    authors    the map in the authors' code: the Bézier curve's y at uniform t, with the last control point at the first layer;
               x is ignored (`bezier` with reversed y's at equally spaced x's is the same map)

Letters: C control points, L layers.
"""

from collections.abc import Callable
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import ArrayError
from lpes_jax.rope import is_traced

Points = Float[Array, "C 2"]


def bezier(points: Array, num_layers: int) -> Float[Array, "L"]:
    """Factors by the paper's map. The ends are exact: s_0 = P_0y, s_(L-1) = P_dy.

    Args:
        points: Control points `[C, 2]` with strictly increasing x (Eq. 10).
        num_layers: L.

    Raises:
        ArrayError: `points` has another shape, is not finite, or x does not increase. For traced points only the shape is
            checked.
    """
    if num_layers < 1:
        raise ArrayError(f"num_layers must be at least 1, got {num_layers}")
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < 2:
        raise ArrayError(f"a curve needs control points [C, 2], at least two, got shape {list(points.shape)}")
    if not is_traced(points):
        values = np.asarray(points, np.float64)
        if not np.isfinite(values).all() or not (np.diff(values[:, 0]) > 0).all():
            raise ArrayError("control points must be finite numbers with strictly increasing x")
    x, y = points[:, 0], points[:, 1]
    x = (x - x[0]) / (x[-1] - x[0])  # so that Eq. 6 is h / (L - 1)
    targets = _layer_positions(num_layers, points.dtype)
    t = jax.lax.stop_gradient(_bisect(x, targets))
    # One Newton step refines t and carries the gradient in x (implicit function theorem); t itself is a constant here.
    slope = jax.lax.stop_gradient(_bernstein(t, len(x) - 2) @ jnp.diff(x)) * (len(x) - 1)
    t = t - _above(x, t, targets) / slope
    ends = jnp.arange(num_layers)
    t = jnp.where(ends == 0, 0.0, jnp.where(ends == num_layers - 1, 1.0, t)).astype(points.dtype)
    return _bernstein(t, len(x) - 1) @ y


def linear(points: Points, num_layers: int) -> Float[Array, "L"]:
    """Linear interpolation between control points with strictly increasing x (paper, Table 6)."""
    return jnp.interp(_x_of_layers(points, num_layers), points[:, 0], points[:, 1])


def step(points: Points, num_layers: int) -> Float[Array, "L"]:
    """The y of the nearest control point; halfway between two points, that of the later one."""
    x = points[:, 0]
    nearest = jnp.searchsorted((x[1:] + x[:-1]) / 2, _x_of_layers(points, num_layers), side="right")
    return points[nearest, 1]


def free(points: Points, num_layers: int) -> Float[Array, "L"]:
    """One value per layer: the y's themselves. Raises ValueError unless there are L control points."""
    if len(points) != num_layers:
        raise ValueError(f"a free curve needs one control point per layer: {num_layers}, got {len(points)}")
    return points[:, 1]


def authors(points: Points, num_layers: int) -> Float[Array, "L"]:
    """The map in the authors' code: y at t = 1 - h / (L - 1); the x's are ignored."""
    return _bernstein(1 - _layer_positions(num_layers, points.dtype), len(points) - 1) @ points[:, 1]


CURVES: dict[str, Callable[[Points, int], Float[Array, "L"]]] = {
    "bezier": bezier,
    "linear": linear,
    "step": step,
    "free": free,
    "authors": authors,
}


def bezier_outline(points: Points, samples: int = 200) -> Float[Array, "samples 2"]:
    """(x, y) along the Bézier curve at uniform t, for plots (Eq. 3)."""
    return _bernstein(jnp.linspace(0, 1, samples, dtype=points.dtype), len(points) - 1) @ points


def _layer_positions(num_layers: int, dtype: jnp.dtype) -> Float[Array, "L"]:
    return jnp.arange(num_layers, dtype=dtype) / max(num_layers - 1, 1)


def _x_of_layers(points: Points, num_layers: int) -> Float[Array, "L"]:
    first, last = points[0, 0], points[-1, 0]
    return first + (last - first) * _layer_positions(num_layers, points.dtype)  # Eq. 6


def _bernstein(t: Float[Array, "L"], degree: int) -> Float[Array, "L C"]:
    return jnp.stack([comb(degree, k) * t**k * (1 - t) ** (degree - k) for k in range(degree + 1)], axis=-1)  # Eq. 4


def _above(x: Float[Array, "C"], t: Float[Array, "L"], targets: Float[Array, "L"]) -> Float[Array, "L"]:
    # x(t) - target as one sum of small terms. Near the ends x(t) may be flat; there, this avoids cancellation.
    return jnp.sum(_bernstein(t, len(x) - 1) * (x - targets[:, None]), axis=-1)


def _bisect(x: Float[Array, "C"], targets: Float[Array, "L"]) -> Float[Array, "L"]:
    """t with x(t) = target (Appendix D). x'(t) > 0 on (0, 1) for strictly increasing x, so the root is unique."""

    def halve(_: Int[Array, ""], interval: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = interval
        middle = (low + high) / 2
        right = _above(x, middle, targets) < 0
        return jnp.where(right, middle, low), jnp.where(right, high, middle)

    steps = jnp.finfo(x.dtype).nmant + 4
    low, high = jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(targets), jnp.ones_like(targets)))
    return (low + high) / 2
