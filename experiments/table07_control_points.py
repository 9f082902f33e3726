"""Table 7: 2 to 5 control points, and "Brute-Force": the same GA on one free factor a layer; all on the paper's lattice of 0.1.

    python experiments/table07_control_points.py --task mdqa --data nq-open-oracle.jsonl.gz --model MODEL

Std is over the positions' accuracies (population, as the paper's proves to be); the generations are those until the fitness of
the best individual stopped changing. Of several seeds both are averages.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grid import GridFlags, figures, markdown_table, other_model, run_grid, run_script, write_tables

CELLS: dict[str, dict[str, Any]] = {
    "Brute-Force": {"curve": "free"},
    **{str(points): {"control_points": points} for points in (2, 3, 4, 5)},
}
PAPER = {
    "Baseline": ("59.9 (± 5.56)", "-"),
    "Brute-Force": ("60.2 (± 4.69)", "20"),
    "2": ("60.6 (± 4.55)", "3"),
    "3": ("62.2 (± 3.97)", "5"),
    "4": ("63.6 (± 3.90)", "9"),
    "5": ("63.8 (± 3.87)", "16"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what."""

    output_path: Path = Path("runs/table07_control_points")


def main(s: Settings) -> None:
    """Run the five searches and write the table."""
    cells = {
        f"{name}/seed{seed}": s.search(y_step=0.1, seed=seed, **changes) for name, changes in CELLS.items() for seed in s.seeds
    }
    records = run_grid(cells, s)
    summary = {"Baseline": mean_of([spread(figures(records[f"4/seed{seed}"], "baseline")) for seed in s.seeds])}
    for name in CELLS:
        of_seeds = [records[f"{name}/seed{seed}"] for seed in s.seeds]
        summary[name] = mean_of([spread(figures(record)) | convergence(record) for record in of_seeds])
    rows = []
    for name, it in summary.items():
        formats = {"generations_until_best": ".3g", "fitness": ".4f", "evaluations": ".0f"}
        searched = [f"{it[key]:{form}}" if key in it else "-" for key, form in formats.items()]
        rows.append([name, f"{it['mean']:.1f} (± {it['std']:.2f})", *searched, *PAPER[name]])
    columns = ["control points", "accuracy (std)", "generations until best", "its fitness", "evaluations"]
    table = markdown_table([*columns, "paper: accuracy (std)", "paper: epochs to convergence"], rows)
    about = s.describe(other_model("Vicuna-7B-v1.5 on MDQA with 10 documents, 500 questions"))
    write_tables(s, "Table 7: number of control points", [about, table], {"ours": summary, "paper": PAPER})


def spread(of_method: dict[str, Any]) -> dict[str, float]:
    """Mean and population standard deviation of the accuracies by position, in percent."""
    by_position = 100 * np.array(list(of_method["acc_by_position"].values()))
    return {"mean": float(by_position.mean()), "std": float(by_position.std())}


def convergence(record: dict[str, Any]) -> dict[str, float]:
    """When the best individual of a search was first seen, how fit it is, and how many the model scored."""
    search = record["factors"]["search"]
    best = next(it for it in record["history"] if it["id"] == search["best_individual"])
    return {
        "generations_until_best": float(best["generation"]),
        "fitness": float(best["fitness"]),
        "evaluations": float(search["evaluations_of_algorithm"]),
    }


def mean_of(of_seeds: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure over seeds."""
    return {name: float(np.mean([seed[name] for seed in of_seeds])) for name in of_seeds[0]}


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
