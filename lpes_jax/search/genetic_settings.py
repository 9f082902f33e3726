"""The settings of the paper's genetic algorithm, and the lattice that it searches: what is known without evosax.

evosax asks JAX for its devices when it is imported, which must not be before several processes have met (lpes_jax.hosts).
"""

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds

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
        check_bounds(self)
        # One point is a curve only where one layer is scaled.
        _require(
            self.control_points >= 2 or self.num_layers == 1, f"--control-points must be at least 2, got {self.control_points}"
        )
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
            codes, way_out = steps(value, origin, step), f"change it or give --{axis}-step 0 (continuous)"
            _require(codes < MAX_CODES, f"--{axis}-step {step} makes more than {MAX_CODES} values; {way_out}")
            _require(codes % 1 == 0, f"{name} is not on the lattice {origin} + k * --{axis}-step {step}; {way_out}")
        for axis, (_, _, step, change) in zip("xy", self.axes, strict=True):
            _require(change == 0 or change >= step, f"--max-change-{axis} {change} is below one step, {step}; 0 pins {axis}")
        places = math.inf if self.x_step == 0 and last > 0 else int(steps(last, 0.0, self.x_step)) + 1
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
        (x_values, y_values), d = self.lattices, max(self.control_points - 1, 1)
        k = np.arange(self.control_points)
        x = k * (self.num_layers - 1) / d if x_values is None else np.round(k * (len(x_values) - 1) / d)
        y = self.initial_factor if y_values is None else np.searchsorted(y_values, self.initial_factor)
        return np.stack([x, np.full(len(k), y)], axis=1).astype(np.float32)

    def search_space(self) -> dict[str, int | None]:
        """Sizes (Appendix B): `paper` (|X| |Y|)^C, `valid` those in order (Eq. 10), `brute_force` |Y|^L; None if continuous."""
        x, y = (None if values is None else len(values) for values in self.lattices)
        return {
            "paper": x and y and (x * y) ** self.control_points,
            "valid": x and y and math.comb(x, self.control_points) * y**self.control_points,
            "brute_force": y and y**self.num_layers,
        }


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
