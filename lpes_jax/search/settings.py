"""The settings of a search applied to a model: the scaled layers, the search space and its lattice.

The flags are defined in lpes_jax/settings/search.py; checks.py has the checks that need no model.
"""

import re
from pathlib import Path

import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.factors import LEAST, MOST, LayerFactors
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.search.lattice import Lattice
from lpes_jax.search.space import Space
from lpes_jax.settings.search import SearchSettings


def scaled_layers(settings: SearchSettings, num_layers: int) -> range:
    """The layers that the curve scales, of `num_layers`. Raises UserError if `--layers` is invalid or names no layer."""
    match = re.fullmatch(r"(\d*):(\d*)", settings.space.layers.strip())
    if match is None:
        raise UserError(
            f"--layers {settings.space.layers!r} is not a slice; give FIRST:END, for example 2: for all but the first two"
        )
    first, end = int(match[1] or 0), int(match[2]) if match[2] else num_layers
    if not 0 <= first < end <= num_layers:
        raise UserError(f"--layers {settings.space.layers!r}: the model has layers 0 to {num_layers - 1}, END is not included")
    return range(first, end)


def search_space(settings: SearchSettings, config: LlamaConfig, layers: range) -> Space:
    """The space that the settings ask for; `layers` of the model are scaled. Raises UserError for invalid settings."""
    s, start = settings.space, settings.start.initial_factors
    standing = s.parameter == "multiplier"
    least = 0.0 if standing else np.nextafter(0.0, 1.0)
    if not least <= s.min_factor <= s.initial_factor <= s.max_factor:
        above = "0 or more" if standing else "above 0"
        raise UserError(
            f"--initial-factor {s.initial_factor} must lie from --min-factor {s.min_factor} ({above}) to "
            f"--max-factor {s.max_factor}"
        )
    least = np.nextafter(0.0, 1.0) if s.parameter == "log" else 0.0
    if s.learn != "factors" and not least <= s.min_gain <= s.initial_gain <= s.max_gain:
        above = "above 0" if s.parameter == "log" else "0 or more"
        raise UserError(
            f"--initial-gain {s.initial_gain} must lie from --min-gain {s.min_gain} ({above}) to --max-gain {s.max_gain}"
        )
    for name in ("min_factor", "max_factor"):
        if not LEAST <= (value := getattr(s, name)) <= MOST and not (standing and value == 0):
            raise UserError(
                f"--{name.replace('_', '-')} must be from {LEAST:g} to {MOST:g}, which float32 can divide by; got {value}"
            )
    half, granularity, units = config.rotary_dim // 2, s.granularity, ()
    bands = half if s.bands == 0 else s.bands  # 0 means one for each frequency
    if "band" in granularity and (bands < 1 or half % bands):
        raise UserError(f"--bands {s.bands} must divide the {half} frequencies of a head")
    if "group" in granularity:
        units += (config.num_kv_heads,)
    if "band" in granularity:
        units += (bands,)
    count = {"free": len(layers), "shared": half}.get(s.curve, 4 if s.control_points is None else s.control_points)
    if s.curve in ("free", "shared"):
        count_text = f"per layer, {count}" if s.curve == "free" else f"per dimension, {count}"
        if s.control_points not in (None, count):
            raise UserError(f"--curve {s.curve} has one control point {count_text}; remove --control-points")
    elif len(layers) < 2:
        raise UserError(f"--curve {s.curve} needs two scaled layers or more, and there is only one; use --curve free")
    elif not 2 <= count <= len(layers):
        raise UserError(f"--control-points must be from 2 to the number of scaled layers, {len(layers)}, got {count}")
    if s.curve == "shared":
        if units:
            raise UserError("--curve shared has one factor per dimension for all layers; remove --granularity")
        granularity = "layer_band"
    space = Space(
        config.num_layers,
        layers,
        s.curve,
        granularity,
        np.linspace(0, len(layers) - 1, count),
        np.full((count, *units), float(s.initial_factor)),
        s.min_factor,
        s.max_factor,
        s.learn,
        s.parameter,
        np.full((count, *units), float(s.initial_gain)),
        s.min_gain,
        s.max_gain,
    )
    if start is None:
        return space
    return space.starting_from(LayerFactors.load(Path(start)), f"--initial-factors {start}")


def lattice_of(settings: SearchSettings, space: Space) -> Lattice:
    """The lattice of the paper's genetic algorithm. Raises UserError if it cannot search the space."""
    if space.y.ndim > 1:
        noun = "gain" if space.learn == "gains" else "factor"
        raise UserError(
            f"--algorithm ga searches one {noun} per layer, not --granularity {space.granularity}; "
            "use --algorithm gradient or one of evosax's (cma_es, ...)"
        )
    start, points = settings.start.initial_factors, None
    if start is not None:
        points = space.points(space.start)
        assert points is not None  # one curve
        points = tuple(map(tuple, points.tolist()))
    pins_x = space.curve in ("free", "shared")
    lattice = Lattice(len(space.x) if pins_x else len(space.layers), len(space.x), settings.space, points)
    x = lattice.initial_genes[:, 0]
    if start is not None and not pins_x and len(space.layers) > 1 and (np.diff(x) <= 0).any():
        index = int(np.argmax(np.diff(x) <= 0))
        raise UserError(
            f"--initial-factors {start}: the x {space.x[index]:g} and {space.x[index + 1]:g} are the same on the "
            f"lattice of --x-step {settings.space.x_step:g}; give --x-step 0 (continuous)"
        )
    return lattice


def check_gradient(settings: SearchSettings) -> None:
    """Raise UserError for settings that gradient descent does not support."""
    if settings.objective.fitness == "metric":
        raise UserError("--fitness metric has no gradient; --algorithm gradient needs log_likelihood")
