"""The lattice that the paper's genetic algorithm searches (Table 9). This module does not import evosax.

Importing evosax makes JAX look for its devices, which must not happen before all processes are connected (lpes_jax.hosts).
"""

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.settings.search import GeneticSettings, SpaceSettings

MAX_CODES = 65536  # the most values per axis: they are tabulated, and codes must be exact in float32


@dataclass(frozen=True)
class Lattice:
    """The values of control points, on a lattice or continuous. Raises UserError if settings contradict each other.

    `num_layers` counts the scaled layers; `initial_points` (x, y) replace the first individual of Eq. 8. Factors are
    dimensionless, x is in layers. A step of 0 makes its axis continuous. With `--learn both` a control point is (x, factor,
    gain).
    """

    num_layers: int
    control_points: int = 4
    space: SpaceSettings = SpaceSettings()
    initial_points: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self):
        check_bounds(self)
        # One point is a curve only if one layer is scaled.
        _require(
            self.control_points >= 2 or self.num_layers == 1, f"--control-points must be at least 2, got {self.control_points}"
        )
        last = self.num_layers - 1.0
        checked = [("x", self.space.x_step, f"the last layer, {last:g},", last, 0.0)]
        for name, (low, high, initial) in self.boxes.items():
            zero_allowed = name == "gain" or self.space.parameter == "multiplier"
            _require(
                (0 <= low if zero_allowed else 0 < low) and low < high,
                f"--min-{name} {low} must be {'0 or more' if zero_allowed else 'above 0'} and below --max-{name} {high}",
            )
            within = f"is outside --min-{name} {low} to --max-{name} {high}"
            _require(low <= initial <= high, f"--initial-{name} {initial} {within}")
            checked += [("y", self.space.y_step, f"--max-{name} {high}", high, low)]
            checked += [("y", self.space.y_step, f"--initial-{name} {initial}", initial, low)]
        for axis, step, name, value, origin in checked:
            codes, way_out = steps(value, origin, step), f"change it or give --{axis}-step 0 (continuous)"
            _require(codes < MAX_CODES, f"--{axis}-step {step} makes more than {MAX_CODES} values; {way_out}")
            _require(codes % 1 == 0, f"{name} is not on the lattice {origin} + k * --{axis}-step {step}; {way_out}")
        values = math.inf if self.space.x_step == 0 and last > 0 else int(steps(last, 0.0, self.space.x_step)) + 1
        crowd = f"{self.num_layers} layers have {values} values of x"
        fits = self.control_points <= values
        _require(fits, f"--control-points {self.control_points} cannot increase in x: {crowd}; give fewer")

    @property
    def pins_x(self) -> bool:
        """A free or shared curve has one control point per layer or dimension, whose x never moves."""
        return self.space.curve in ("free", "shared")

    @property
    def boxes(self) -> dict[str, tuple[float, float, float]]:
        """Minimum, maximum and initial value of each learnt number: factor (or multiplier), gain."""
        space = self.space
        factor = {"factor": (space.min_factor, space.max_factor, space.initial_factor)}
        gain = {"gain": (space.min_gain, space.max_gain, space.initial_gain)}
        return {"factors": factor, "gains": gain, "both": factor | gain}[space.learn]

    @property
    def axes(self) -> tuple[tuple[float, float, float], ...]:
        """Minimum, maximum and lattice step of x, and of each learnt number."""
        x = 0.0, self.num_layers - 1.0, self.space.x_step
        return x, *((low, high, self.space.y_step) for low, high, _ in self.boxes.values())

    @property
    def lattices(self) -> tuple[Float[np.ndarray, "values"] | None, ...]:
        """The values of P^x (in layers) and of each P^y, float64 (Table 9); None for a continuous axis."""
        return tuple(_lattice(low, high, step) for low, high, step in self.axes)

    @property
    def initial_genes(self) -> Float[np.ndarray, "C axes"]:
        """Eq. 8: (k (L-1)/d, initial factor) for k = 0..d, x rounded to the lattice (half to even), as float32 genes.

        With `initial_points`, the genes nearest to those.
        """
        if self.initial_points is not None:
            return np.stack(
                [
                    np.clip(value, low, high) if table is None else np.abs(table[None] - value[:, None]).argmin(axis=1)
                    for value, table, (low, high, _) in zip(
                        np.array(self.initial_points).T, self.lattices, self.axes, strict=True
                    )
                ],
                axis=1,
            ).astype(np.float32)
        (x_values, *y_values), d = self.lattices, max(self.control_points - 1, 1)
        k = np.arange(self.control_points)
        genes = [k * (self.num_layers - 1) / d if x_values is None else np.round(k * (len(x_values) - 1) / d)]
        for values, (_, _, initial) in zip(y_values, self.boxes.values(), strict=True):
            genes.append(np.full(len(k), initial if values is None else np.searchsorted(values, initial)))
        return np.stack(genes, axis=1).astype(np.float32)

    def search_space(self) -> dict[str, int | None]:
        """Sizes (Appendix B): `paper` (|X| |Y|)^C; `valid` only x in order (Eq. 10); `brute_force` |Y|^L; None if continuous.

        |Y| counts the combinations of all learnt numbers.
        """
        x, *y_sizes = (None if values is None else len(values) for values in self.lattices)
        y = None if None in y_sizes else math.prod(size for size in y_sizes if size)
        return {
            "paper": x and y and (x * y) ** self.control_points,
            "valid": x and y and math.comb(x, self.control_points) * y**self.control_points,
            "brute_force": y and y**self.num_layers,
        }


def max_changes(settings: GeneticSettings, lattice: Lattice) -> tuple[float, ...]:
    """The largest change in a mutation (M_x, M_y) of each axis of the lattice; 0 pins it.

    Raises UserError if sizes of the genetic algorithm contradict each other, or a change is smaller than a step.
    """
    check_bounds(settings)
    _require(settings.mutations + settings.crossovers > 0, "--mutations and --crossovers are both 0; give one of them")
    size, parents = f"--population-size {settings.population_size}", f"--parents {settings.parents}"
    _require(settings.parents <= settings.population_size, f"{parents} is more than {size}; lower it")
    enough = settings.parents >= 2 or settings.crossovers == 0
    _require(enough, f"{parents} is too few for --crossovers {settings.crossovers}; give 2 or more")
    change_x = 0.0 if lattice.pins_x else settings.max_change_x
    changes = change_x, *[settings.max_change_y] * len(lattice.boxes)
    for axis, (_, _, step), change in zip("xy", lattice.axes, changes, strict=False):
        _require(change == 0 or change >= step, f"--max-change-{axis} {change} is below one step, {step}; 0 pins {axis}")
    return changes


def _require(met: bool, message: str) -> None:
    if not met:
        raise UserError(message)


def steps(value: float, origin: float, step: float) -> Decimal:
    """(value - origin) / step in decimals, where 0.2 is exactly two steps of 0.1; 0 for no step."""
    return (Decimal(str(value)) - Decimal(str(origin))) / Decimal(str(step)) if step else Decimal(0)


def _lattice(low: float, high: float, step: float) -> Float[np.ndarray, "codes"] | None:
    if step == 0:
        return None
    codes = range(int(steps(high, low, step)) + 1)
    return np.array([float(Decimal(str(low)) + code * Decimal(str(step))) for code in codes])
