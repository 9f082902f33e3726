"""What a search moves, and the factors that it makes: control points of a curve, for a layer or for each part of a layer.

    space = search_space(settings, config)
    factors = space.factors(space.x, space.y)            # [L] at granularity `layer`, [L, 8] with eight bands, ...

A space has C control points. Their x are layers, counted from the first that is scaled; their y are factors: one for each
point, or with a finer granularity one for each point and unit (frequency band, KV group) of a layer, each unit a curve of its
own. With `free` the points are the layers. With `shared` they are the dimensions of a head, and all layers have the same
factors (as LongRoPE has). Layers that `--layers` leaves out have factor 1.

Letters: C control points, L layers, K key-value heads.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.curves import CURVES
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.rope import Granularity

LEAST_GAP = 0.05  # between neighbouring x, in layers, where a gradient moves them
_ROUNDING = 1e-6  # of a number that was float32, or written with seven digits


@dataclass(frozen=True)
class Space:
    """`x` `[C]` and `y` `[C, *units]` are where a search starts; `low` and `high` are the box of y. Factors without unit."""

    num_layers: int
    layers: range
    curve: str
    granularity: Granularity
    x: Float[np.ndarray, "C"]
    y: Float[np.ndarray, "C *units"]
    low: float
    high: float

    def factors(self, x: Float[Array | np.ndarray, "C"], y: Float[Array | np.ndarray, "C *units"]) -> Float[Array, "L ..."]:
        """The factors of all layers, of every granularity but `layer` with the axes of its units. Traceable."""
        y = jnp.asarray(y)
        x = jnp.asarray(x, y.dtype)
        if self.curve == "shared":
            scaled = jnp.broadcast_to(y, (len(self.layers), len(y)))
        else:

            def of_unit(y: Float[Array, "C"]) -> Float[Array, "layers"]:
                return CURVES[self.curve](jnp.stack([x, y], axis=1), len(self.layers))

            units = y.reshape(len(y), -1)
            scaled = jax.vmap(of_unit, in_axes=1, out_axes=1)(units).reshape(-1, *y.shape[1:])
        factors = jnp.ones((self.num_layers, *scaled.shape[1:]), y.dtype)
        return factors.at[self.layers.start : self.layers.stop].set(scaled)

    def in_order(self, x: Float[Array, "C"]) -> Float[Array, "C"]:
        """x with its ends on the first and the last scaled layer and neighbours at least `LEAST_GAP` apart."""
        last, count = len(self.layers) - 1.0, len(self.x)
        placed = [jnp.zeros_like(x[0])]
        for at in range(1, count - 1):
            placed.append(jnp.clip(x[at], placed[-1] + LEAST_GAP, last - LEAST_GAP * (count - 1 - at)))
        return jnp.stack([*placed, jnp.full_like(x[0], last)])

    def starting_from(self, factors: LayerFactors, where: str) -> "Space":
        """The space with its start at factors that another search found: its control points, or with `free` its factors.

        Raises UserError where they are none of this space: of another curve, other layers or units, outside the box, or with
        control points against Eq. 10. Nothing is moved to where it would be allowed.
        """
        if factors.num_layers != self.num_layers:
            raise UserError(f"{where}: {factors.num_layers} layers of factors, but the model has {self.num_layers}")
        if self.curve == "free":
            self._check_left_out(factors, where)
            found = factors.factors[self.layers.start : self.layers.stop]
            if factors.granularity == "layer":
                found = np.broadcast_to(found.reshape(len(found), *(1 for _ in self.y.shape[1:])), self.y.shape)
            elif factors.granularity != self.granularity or found.shape != self.y.shape:
                raise UserError(
                    f"{where}: factors of granularity {factors.granularity}; give --granularity and --bands as there"
                )
            return replace(self, y=self._in_box(found, where))
        curve = factors.curve or {}
        try:
            points = np.array(curve.get("control_points") or [], np.float64)
        except (TypeError, ValueError):  # not numbers, or not two in each
            points = np.empty(0)
        if curve.get("type") != self.curve or points.shape != (len(self.x), 2) or self.y.ndim > 1:
            raise UserError(
                f"{where}: holds no {len(self.x)} control points of a {self.curve} curve; give --curve and "
                "--control-points as that search had them, or --curve free"
            )
        y = self._in_box(points[:, 1], where)
        if self.curve == "shared":  # whose x are dimensions in their order
            return replace(self, y=y)
        scaled = [self.layers[0], self.layers[-1]]
        if curve.get("layers", scaled) != scaled:
            raise UserError(
                f"{where}: its curve goes over the layers {curve['layers']!r:.40} (first and last), that of this search over "
                f"{scaled}; give --layers as there, or --curve free"
            )
        return replace(self, x=self._increasing(points[:, 0], where), y=y)

    def _check_left_out(self, factors: LayerFactors, where: str) -> None:
        """Raise UserError where a layer that this search leaves as it is has another factor than 1."""
        for layer in sorted({*range(self.num_layers)} - {*self.layers}):
            others = factors.factors[layer].ravel()
            if (others := others[others != 1]).size:
                raise UserError(
                    f"{where}: layer {layer} has factor {others[0]:g}, and --layers leaves that layer as it is; widen --layers"
                )

    def _in_box(self, y: Float[np.ndarray, "C *units"], where: str) -> Float[np.ndarray, "C *units"]:
        """y, but for rounding; UserError for the first that lies outside the box or is not finite."""
        inside = (y >= self.low - _ROUNDING * self.low) & (y <= self.high + _ROUNDING * self.high)  # false for NaN
        if not inside.all():
            at = np.argwhere(~inside)[0]
            value, what = float(y[tuple(at)]), {"free": "layer", "shared": "dimension"}.get(self.curve, "control point")
            number = self.layers[at[0]] if self.curve == "free" else at[0]
            if not np.isfinite(value):
                raise UserError(f"{where}: {what} {number} has the factor {value}, which is not finite")
            side, flag, bound = ("below", "min", self.low) if value < self.low else ("above", "max", self.high)
            raise UserError(
                f"{where}: {what} {number} has the factor {value:g}, {side} --{flag}-factor {bound:g}; widen --{flag}-factor"
            )
        return np.clip(y, self.low, self.high)

    def _increasing(self, x: Float[np.ndarray, "C"], where: str) -> Float[np.ndarray, "C"]:
        """x, but for rounding; UserError where it leaves the scaled layers or does not increase (Eq. 10)."""
        last = len(self.layers) - 1.0
        inside = (x >= -_ROUNDING) & (x <= last + _ROUNDING * last)  # false for NaN
        if not inside.all():
            raise UserError(
                f"{where}: control point {np.argmin(inside)} has x {x[np.argmin(inside)]:g}; x goes from 0 to {last:g}, the "
                "last of the layers that this search scales"
            )
        if last and (np.diff(x) <= 0).any():
            at = int(np.argmax(np.diff(x) <= 0))
            raise UserError(
                f"{where}: the control points {at} and {at + 1} have x {x[at]:g} and {x[at + 1]:g}; x must increase (Eq. 10)"
            )
        return np.clip(x, 0, last)
