"""Which layers matter: one factor on only the early, middle or late third, and optimised factors on only one half.

    python experiments/layer_groups.py --num-pairs 5

The thirds are measured on held-out questions, by position. The halves are searched with --algorithm and --curve, and compared
with the same search on all layers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from grid import GridFlags, figures, header, held_out, loaded_once, markdown_table, row, run_grid, run_script, write_tables

from lpes_jax.evaluation import slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.results import figures_of
from lpes_jax.tasks.flags import task_of


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """The model, the questions and the factors."""

    output_path: Path = Path("runs/layer_groups")
    preset: Literal["paper", "default", "quick"] = "default"
    factors: tuple[float, ...] = (0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
    """Factors of a third of the layers, 1 in the others."""
    algorithm: str = "gradient"
    """The halves' optimiser: gradient, ga, or one of evosax's."""
    curve: Literal["free", "bezier", "linear", "step"] = "free"
    """The curve of the halves' factors."""


def main(s: Settings) -> None:
    """Search the halves, measure the thirds, and write both tables."""
    settings = s.search(seed=s.seeds[0])
    loaded = loaded_once(s.model, settings.devices.dtype, settings.devices.weight_format)
    layers = loaded.model.config.num_layers
    halves = {"all": ":", f"0 to {layers // 2 - 1}": f":{layers // 2}", f"{layers // 2} to {layers - 1}": f"{layers // 2}:"}
    names = dict(zip(halves, ("all", "first_half", "last_half"), strict=True))
    cells = {
        f"{names[title]}/seed{seed}": s.search(layers=chosen, seed=seed) for title, chosen in halves.items() for seed in s.seeds
    }
    records = run_grid(cells, s)
    thirds, factors = np.array_split(np.arange(layers), 3), {}
    for title, third in zip(("early", "middle", "late"), thirds, strict=True):
        for factor in s.factors:
            values = np.where(np.isin(np.arange(layers), third), factor, 1.0)
            factors[f"{title}, layers {third[0]} to {third[-1]}: {factor:g}"] = LayerFactors(values)
    outcomes = held_out(settings, loaded, factors)
    measured = figures_of(list(outcomes.values()), slots_of(task_of(settings.task), settings.questions.positions))
    found_everywhere = [records[f"all/seed{seed}"] for seed in s.seeds]
    found = {"baseline": [figures(record, "baseline") for record in found_everywhere]}
    found |= {
        f"layers {title}, {s.curve}, {s.algorithm}": [figures(records[f"{names[title]}/seed{seed}"]) for seed in s.seeds]
        for title in halves
    }
    tables = [
        markdown_table(
            header("one factor on a third", settings.questions.positions),
            [row(name, [accuracies]) for name, accuracies in measured.items()],
        ),
        markdown_table(
            header("optimised factors", settings.questions.positions),
            [row(name, accuracies) for name, accuracies in found.items()],
        ),
    ]
    about = s.describe("The paper scales all layers and gives no figures for some of them; its models are larger ones.")
    write_tables(s, "Groups of layers", [about, *tables], {"thirds": measured, "halves": found})


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
