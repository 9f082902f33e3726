"""RoPE's decay with distance and the troughs of its waves, against the scaling factor (Figures 3 and 4).

    python experiments/rope_decay.py --factors 1 1.2 1.5 2

Only the formula is used, no weights. A query and a key of ones that are d tokens apart have, with inverse frequencies w_i (i <
R/2) and factor s,

    waves(d, s) = 2/R sum_i cos(d w_i / s)                                their product, 1 at distance 0
    decay(d, s) = sum_j |sum_{i<=j} exp(i d w_i / s)| / sum_j (j + 1)     RoFormer's bound (arXiv 2104.09864, 3.4.3), likewise 1

Both are functions of d / s: a factor stretches them and changes no value. The table has the distance at which the decay first
falls below a half, and the first troughs (local minima) of the waves. The plot shows a moving average of the decay, and the
waves of near distances only, because both are too dense otherwise. Writes rope_decay.{png,svg}, tables.md and summary.json.

Letters: N distances, R rotated elements of a head.
"""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from grid import GridFlags, markdown_table, run_script, write_tables
from jaxtyping import Float
from matplotlib.figure import Figure

from lpes_jax.errors import UserError
from lpes_jax.models.llama.checkpoint import open_checkpoint
from lpes_jax.models.zoo import resolve
from lpes_jax.report.plots import BASELINE, FOUND, OTHERS, plain, save
from lpes_jax.rope import RopeParameters, inverse_frequencies, scale_layers

NEAR = 200  # tokens of the waves in the picture


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The RoPE and the factors."""

    output_path: Path = Path("runs/rope_decay")
    """Folder of the plot and the tables."""
    factors: tuple[float, ...] = (1.0, 1.2, 1.5, 2.0)
    """Scaling factors."""
    model: str | None = None
    """RoPE of this model (default: --theta and --head-dim); only its configuration is read."""
    theta: float = 10_000.0
    """The base; default: Llama 2's."""
    head_dim: int = 128
    """Elements of a head; default: Llama 2's."""
    longest: int = 4096
    """Distances up to this one, in tokens."""


def waves(inv_freq: Float[np.ndarray, "half"], distances: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """2/R sum_i cos(d w_i)."""
    return np.cos(distances[:, None] * inv_freq).mean(axis=1)


def decay(inv_freq: Float[np.ndarray, "half"], distances: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """sum_j |sum_{i<=j} exp(i d w_i)| / sum_j (j + 1)."""
    sums = np.abs(np.cumsum(np.exp(1j * distances[:, None] * inv_freq), axis=1))
    return sums.sum(axis=1) / np.arange(1, len(inv_freq) + 1).sum()


def scaled(rope: RopeParameters, head_dim: int, factor: float) -> Float[np.ndarray, "half"]:
    """The inverse frequencies of a layer with this factor."""
    inv_freq = scale_layers(inverse_frequencies(rope, head_dim), jnp.full(1, factor, jnp.float32))
    return np.asarray(inv_freq[0, 0], np.float64)


def troughs(values: Float[np.ndarray, "N"]) -> list[int]:
    """The indices of a curve's local minima."""
    inside = values[1:-1]
    return (1 + np.flatnonzero((inside < values[:-2]) & (inside <= values[2:]))).tolist()


def main(s: Settings) -> None:
    """Compute, draw, write."""
    if s.longest < 2 or not s.factors or not all(factor > 0 for factor in s.factors):
        raise UserError("--longest must be at least 2, and --factors one or more numbers above 0")
    rope, head_dim = RopeParameters(rope_theta=s.theta), s.head_dim
    if s.model is not None:
        config = open_checkpoint(resolve(s.model)).config
        rope, head_dim = config.rope, config.head_dim
    distances = np.arange(s.longest + 1, dtype=np.float64)
    curves = {}
    for factor in s.factors:
        inv_freq = scaled(rope, head_dim, factor)
        wave_values, decay_values = waves(inv_freq, distances), decay(inv_freq, distances)
        curves[f"{factor:g}"] = {
            "waves": wave_values.round(5).tolist(),
            "decay": decay_values.round(5).tolist(),
            "decay_below_half_from": next(iter(np.flatnonzero(decay_values < 0.5).tolist()), None),
            "troughs": troughs(wave_values),
            "mean_of_waves_by_third": [float(part.mean()) for part in np.array_split(wave_values, 3)],
        }
    rows = [
        [
            factor,
            str(curve["decay_below_half_from"] or "-"),
            ", ".join(map(str, curve["troughs"][:6])) or "-",
            *(f"{value:.3f}" for value in curve["mean_of_waves_by_third"]),
        ]
        for factor, curve in curves.items()
    ]
    header = ["factor", "decay below 1/2 from", "first troughs", *(f"waves, third {n}" for n in (1, 2, 3))]
    name = s.model or f"theta {rope.rope_theta:g}, heads of {head_dim}"
    about = f"RoPE of {name}; distances up to {s.longest} tokens. The paper has no figures for its pictures.\n"
    s.output_path.mkdir(parents=True, exist_ok=True)
    _draw(s.output_path / "rope_decay", curves, f"RoPE by distance: {name}")
    summary = {"rope": rope.to_hf(), "head_dim": head_dim, "distances": [0, s.longest], "factors": curves}
    flags = GridFlags(output_path=s.output_path)
    write_tables(flags, "RoPE's decay and waves (Figures 3 and 4)", [about, markdown_table(header, rows)], summary)


def _draw(stem: Path, curves: dict[str, dict], title: str) -> None:
    figure = Figure(figsize=(10, 4.2), dpi=200, layout="constrained")
    colours = [BASELINE, *OTHERS, FOUND]
    left, right = figure.subplots(1, 2)
    for number, (factor, curve) in enumerate(curves.items()):
        style = {"color": colours[number % len(colours)], "linewidth": 1.5, "label": f"s = {factor}"}
        over = max(1, len(curve["decay"]) // 32)
        smooth = np.convolve(curve["decay"], np.full(over, 1 / over), "valid")
        left.plot(np.arange(len(smooth)) + over // 2, smooth, **style)
        right.plot(curve["waves"][:NEAR], **style)
    left.set(xlabel="distance (tokens)", ylabel="decay, moving average")
    right.set(xlabel="distance (tokens)", ylabel="waves, 1 at distance 0")
    for axes in (left, right):
        plain(axes)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    save(figure, stem)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
