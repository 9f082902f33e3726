"""The search space: control points of curves over the layers, and the factors and gains that they give.

    space = search_space(settings, config)
    factors = space.factors(space.x, space.y)            # [L] at granularity `layer`, [L, 8] with eight bands, ...
    factors, gains = space.individual(space.start)       # gains is None unless gains are learnt

A space has C control points. Their x are layers, counted from the first scaled one. Their y are factors (or multipliers, which
are 1 / factor and may be 0), and their g are gains. Each point has one y and one g, or with a finer granularity one per unit of
a layer (frequency band, KV group); each unit then has its own curve. y and g are curves over the same x. With `free` the points
are the layers. With `shared` they are the dimensions of a head, and all layers have the same numbers, as in LongRoPE. Layers
that `--layers` leaves out have factor and gain 1.

Letters: C control points, L layers, K key-value heads.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.choices import Learn, Parameter
from lpes_jax.curves import CURVES
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.rope import Granularity, RopeTable

LEAST_GAP = 0.05  # between neighbouring x, in layers, if a gradient moves them
_ROUNDING = 1e-6  # of a number that was float32, or written with seven digits


class Numbers(NamedTuple):
    """The numbers of an individual. Those that are not learnt keep their start values."""

    x: Float[Array | np.ndarray, "C"]
    y: Float[Array | np.ndarray, "C *units"]
    g: Float[Array | np.ndarray, "C *units"]


_NOUNS = {"y": "factor", "g": "gain"}


@dataclass(frozen=True)
class Space:
    """A search starts at `x` `[C]`, `y` and `g` `[C, *units]` (`g` None: 1).

    `low` and `high` bound y, `low_gain` and `high_gain` bound g. All are dimensionless.
    """

    num_layers: int
    layers: range
    curve: str
    granularity: Granularity
    x: Float[np.ndarray, "C"]
    y: Float[np.ndarray, "C *units"]
    low: float
    high: float
    learn: Learn = "factors"
    parameter: Parameter = "factor"
    g: Float[np.ndarray, "C *units"] | None = None
    low_gain: float = 1.0
    high_gain: float = 1.0

    @property
    def start(self) -> Numbers:
        return Numbers(self.x, self.y, np.ones_like(self.y) if self.g is None else self.g)

    @property
    def learnt(self) -> dict[str, tuple[Float[np.ndarray, "C *units"], float, float]]:
        """The learnt ones of y and g, each with its start values, its minimum and its maximum."""
        gains = np.ones_like(self.y) if self.g is None else self.g
        columns = {"y": (self.y, self.low, self.high), "g": (gains, self.low_gain, self.high_gain)}
        return {name: columns[name] for name in {"factors": "y", "gains": "g", "both": "yg"}[self.learn]}

    @property
    def granularities(self) -> tuple[Granularity, Granularity]:
        """The granularities of the factors and of the gains that `individual` returns."""
        return ("layer" if self.learn == "gains" else self.granularity), self.granularity

    def individual(self, numbers: Numbers) -> tuple[Float[Array, "L ..."], Float[Array, "L ..."] | None]:
        """The factors of all layers (1 if not learnt) and the gains (None if not learnt). Traceable."""
        factors = jnp.ones(self.num_layers) if self.learn == "gains" else self.factors(numbers.x, numbers.y)
        return factors, None if self.learn == "factors" else self.at_layers(numbers.x, numbers.g)

    def table(self, own: RopeTable, numbers: Numbers) -> RopeTable:
        """A model's own table with the learnt factors and gains. Differentiable, also at multipliers of 0."""
        table = own
        if "y" in self.learnt:
            change = table.multiplied if self.parameter == "multiplier" else table.scaled
            table = change(self.at_layers(numbers.x, numbers.y), self.granularity)
        return table.with_gains(self.at_layers(numbers.x, numbers.g), self.granularity) if "g" in self.learnt else table

    def points(self, numbers: Numbers) -> Float[np.ndarray, "C n"] | None:
        """x and the learnt numbers as columns, for records; None if units of a layer have their own curves."""
        columns = [numbers.x, *(getattr(numbers, name) for name in self.learnt)]
        return np.stack(columns, axis=1) if columns[1].ndim == 1 else None

    def numbers(self, points: Float[Array | np.ndarray, "C n"]) -> Numbers:
        """The inverse of `points`. Traceable."""
        columns = {name: points[:, 1 + column] for column, name in enumerate(self.learnt)}
        return self.start._replace(x=points[:, 0], **columns)

    def factors(self, x: Float[Array | np.ndarray, "C"], y: Float[Array | np.ndarray, "C *units"]) -> Float[Array, "L ..."]:
        """The factors of all layers, with an axis per kind of unit of the granularity. Traceable."""
        values = self.at_layers(x, y)
        return 1 / values if self.parameter == "multiplier" else values

    def at_layers(self, x: Float[Array | np.ndarray, "C"], y: Float[Array | np.ndarray, "C *units"]) -> Float[Array, "L ..."]:
        """The values at each layer of the curves of y over x; 1 at layers that --layers leaves out."""
        y = jnp.asarray(y)
        x = jnp.asarray(x, y.dtype)
        if self.curve == "shared":
            scaled = jnp.broadcast_to(y, (len(self.layers), len(y)))
        else:

            def evaluate_unit(y: Float[Array, "C"]) -> Float[Array, "layers"]:
                return CURVES[self.curve](jnp.stack([x, y], axis=1), len(self.layers))

            units = y.reshape(len(y), -1)
            scaled = jax.vmap(evaluate_unit, in_axes=1, out_axes=1)(units).reshape(-1, *y.shape[1:])
        factors = jnp.ones((self.num_layers, *scaled.shape[1:]), y.dtype)
        # No x.at[...].set: see `over_population`.
        return jax.lax.dynamic_update_slice_in_dim(factors, scaled, self.layers.start, axis=0)

    def in_order(self, x: Float[Array, "C"]) -> Float[Array, "C"]:
        """x with its ends on the first and the last scaled layer and neighbours at least `LEAST_GAP` apart."""
        last, count = len(self.layers) - 1.0, len(self.x)
        placed = [jnp.zeros_like(x[0])]
        for point in range(1, count - 1):
            placed.append(jnp.clip(x[point], placed[-1] + LEAST_GAP, last - LEAST_GAP * (count - 1 - point)))
        return jnp.stack([*placed, jnp.full_like(x[0], last)])

    def starting_from(self, factors: LayerFactors, where: str) -> "Space":
        """The space, starting from factors that another search found: from its control points, or with `free` from its factors.

        Raises UserError if they do not belong to this space: another curve, other layers or units, values outside the box, or
        control points that violate Eq. 10. Values are never moved into the box.
        """
        if factors.num_layers != self.num_layers:
            raise UserError(f"{where}: {factors.num_layers} layers of factors, but the model has {self.num_layers}")
        if self.learn == "factors" and factors.gains is not None:
            raise UserError(f"{where}: has gains, which --learn factors would ignore; use --learn both")
        if self.learn == "gains" and (factors.factors != 1).any():
            raise UserError(f"{where}: has factors other than 1, which --learn gains would ignore; use --learn both")
        if self.curve == "free":
            start_y = 1 / factors.factors if self.parameter == "multiplier" else factors.factors
            found = {"y": (start_y, factors.granularity), "g": (factors.gains, factors.gains_granularity or "layer")}
            start = {}
            for name in self.learnt:
                values, granularity = found[name]
                if values is not None:
                    self._check_left_out(name, values, where)
                    start[name] = self._in_box(name, self._of_units(name, values, granularity, where), where)
            return replace(self, **start)
        curve = factors.curve or {}
        try:
            points = np.array(curve.get("control_points") or [], np.float64)
        except (TypeError, ValueError):  # not numbers, or rows of different lengths
            points = np.empty(0)
        kind = curve.get("type"), curve.get("learn", "factors"), curve.get("parameter", "factor") == "multiplier"
        wanted = self.curve, self.learn, self.parameter == "multiplier"
        if kind != wanted or points.shape != (len(self.x), 1 + len(self.learnt)) or self.y.ndim > 1:
            mode = "" if wanted[1:] == ("factors", False) == kind[1:] else f" for --learn {self.learn}"
            flags = "--curve and --control-points" if not mode else "--curve, --control-points, --learn and --parameter"
            raise UserError(
                f"{where}: does not contain {len(self.x)} control points of a {self.curve} curve{mode}; give {flags} as in "
                "that search, or --curve free"
            )
        numbers = self.numbers(points)
        start = {name: self._in_box(name, getattr(numbers, name), where) for name in self.learnt}
        if self.curve == "shared":  # its x are the dimensions, in order
            return replace(self, **start)
        scaled = [self.layers[0], self.layers[-1]]
        if curve.get("layers", scaled) != scaled:
            raise UserError(
                f"{where}: its curve spans the layers {curve['layers']!r:.40} (first and last), and this search spans "
                f"{scaled}; use the same --layers, or --curve free"
            )
        return replace(self, x=self._increasing(points[:, 0], where), **start)

    def _of_units(
        self, name: str, found: Float[np.ndarray, "L *found"], granularity: Granularity, where: str
    ) -> Float[np.ndarray, "C *units"]:
        """The values of the scaled layers, in the units of this space."""
        found = found[self.layers.start : self.layers.stop]
        if granularity == "layer":
            return np.broadcast_to(found.reshape(len(found), *(1 for _ in self.y.shape[1:])), self.y.shape)
        if granularity != self.granularity or found.shape != self.y.shape:
            raise UserError(f"{where}: {_NOUNS[name]}s of granularity {granularity}; use the same --granularity and --bands")
        return found

    def _check_left_out(self, name: str, values: Float[np.ndarray, "L *units"], where: str) -> None:
        """Raise UserError if a layer that this search does not scale has a factor or gain other than 1."""
        for layer in sorted({*range(self.num_layers)} - {*self.layers}):
            others = values[layer].ravel()
            if (others := others[others != 1]).size:
                raise UserError(
                    f"{where}: layer {layer} has {_NOUNS[name]} {others[0]:g}, and --layers does not include that layer; widen "
                    "--layers"
                )

    def _in_box(self, name: str, values: Float[np.ndarray, "C *units"], where: str) -> Float[np.ndarray, "C *units"]:
        """The values, clipped if they exceed the box by rounding only. Raises UserError for others and for NaN."""
        _, low, high = self.learnt[name]
        noun = _NOUNS[name]
        inside = (values >= low - _ROUNDING * low) & (values <= high + _ROUNDING * high)  # false for NaN
        if not inside.all():
            index = np.argwhere(~inside)[0]
            value, unit = float(values[tuple(index)]), {"free": "layer", "shared": "dimension"}.get(self.curve, "control point")
            number = self.layers[index[0]] if self.curve == "free" else index[0]
            if not np.isfinite(value):
                raise UserError(f"{where}: {unit} {number} has the {noun} {value}, which is not finite")
            side, flag, bound = ("below", "min", low) if value < low else ("above", "max", high)
            raise UserError(
                f"{where}: {unit} {number} has the {noun} {value:g}, {side} --{flag}-{noun} {bound:g}; widen --{flag}-{noun}"
            )
        return np.clip(values, low, high)

    def _increasing(self, x: Float[np.ndarray, "C"], where: str) -> Float[np.ndarray, "C"]:
        """x without rounding errors. Raises UserError if it leaves the scaled layers or does not increase (Eq. 10)."""
        last = len(self.layers) - 1.0
        inside = (x >= -_ROUNDING) & (x <= last + _ROUNDING * last)  # false for NaN
        if not inside.all():
            raise UserError(
                f"{where}: control point {np.argmin(inside)} has x {x[np.argmin(inside)]:g}; x must be from 0 to {last:g}, the "
                "last layer that this search scales"
            )
        if last and (np.diff(x) <= 0).any():
            index = int(np.argmax(np.diff(x) <= 0))
            raise UserError(
                f"{where}: the control points {index} and {index + 1} have x {x[index]:g} and {x[index + 1]:g}; "
                "x must increase (Eq. 10)"
            )
        return np.clip(x, 0, last)
