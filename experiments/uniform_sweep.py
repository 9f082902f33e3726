"""Accuracy by position against one uniform factor for all layers: lost in the tail?

    python experiments/uniform_sweep.py --num-pairs 5

The paper's Appendix G: a factor above 1 helps early positions and hurts late ones. No search; held-out questions of the first
seed.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from grid import GridFlags, header, held_out, markdown_table, other_model, paper_row, row, run_script, write_tables

from lpes_jax.evaluation import figures_of, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import load
from lpes_jax.tasks.flags import task_of

PAPER = {
    "baseline": "70.4 58.0 55.4 55.4 60.4 59.9",
    "uniform, the mean of the found factors": "71.2 59.6 58.8 56.4 56.2 60.4",
}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what, which factors."""

    output_path: Path = Path("runs/uniform_sweep")
    factors: tuple[float, ...] = tuple(np.arange(0.5, 2.05, 0.1).round(1).tolist())
    """Uniform factors."""


def main(s: Settings) -> None:
    """Measure every factor and write the table."""
    settings = s.search(seed=s.seeds[0])
    loaded = load(s.model, settings.devices.dtype)
    layers = loaded.model.config.num_layers
    outcomes = held_out(settings, loaded, {f"{factor:g}": LayerFactors.uniform(factor, layers) for factor in s.factors})
    found = figures_of(list(outcomes.values()), slots_of(task_of(settings.task), settings.questions.positions))
    by_position = np.array([list(found[f"{factor:g}"]["acc_by_position"].values()) for factor in s.factors])
    best = [f"{s.factors[at]:g}" for at in [*by_position.argmax(axis=0), by_position.mean(axis=1).argmax()]]
    rows = [row(name, [it]) for name, it in found.items()] + [["best factor", *best, "-"]]
    rows += [paper_row(name, values) for name, values in PAPER.items()]
    table = markdown_table(header("factor", settings.questions.positions), rows)
    about = s.describe(other_model("Table 1, Vicuna-7B-v1.5 on MDQA with 10 documents, 500 questions"))
    write_tables(s, "One uniform factor", [about, table], {"ours": found, "paper": PAPER, "best": best})


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
