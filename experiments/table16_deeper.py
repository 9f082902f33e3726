"""Table 16: linear interpolation against the Bézier curve on a deeper model, at every tenth of the prompt.

    python experiments/table16_deeper.py --num-pairs 11 --model smollm2-135m-instruct      # 30 layers

With fewer than 11 items a prompt, neighbouring columns are the same slot.
"""

from dataclasses import dataclass
from pathlib import Path

from grid import (
    GridFlags,
    figures,
    header,
    markdown_table,
    other_model,
    paper_row,
    row,
    run_grid,
    run_script,
    scores,
    show_p,
    write_tables,
)

from lpes_jax.statistics import paired_permutation_test

POSITIONS = tuple(range(0, 101, 10))
CURVES = {"linear": "linear interpolation", "bezier": "Bézier curve"}
PAPER = {
    "baseline": "70.4 66.2 66.4 65.2 64.8 64.0 63.0 62.0 63.4 65.2 65.2 65.1",
    "linear interpolation": "71.8 66.4 64.4 65.0 64.6 64.0 64.6 63.4 62.8 65.2 65.2 65.2",
    "Bézier curve": "71.8 68.4 69.4 66.6 65.2 65.2 65.0 64.0 65.8 65.2 65.2 66.5",
}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what."""

    output_path: Path = Path("runs/table16_deeper")


def main(s: Settings) -> None:
    """Run the two searches and write the table."""
    cells = {
        f"{curve}/seed{seed}": s.search(curve=curve, seed=seed, positions=POSITIONS) for curve in CURVES for seed in s.seeds
    }
    records = run_grid(cells, s)
    of_curve = {curve: [records[f"{curve}/seed{seed}"] for seed in s.seeds] for curve in CURVES}
    found = {
        "baseline": [figures(record, "baseline") for record in of_curve["bezier"]],
        "tuned uniform factor": [figures(record, "uniform") for record in of_curve["bezier"]],
        **{CURVES[curve]: [figures(record) for record in of_curve[curve]] for curve in CURVES},
    }
    p = [
        paired_permutation_test(scores(bezier), scores(linear))
        for bezier, linear in zip(of_curve["bezier"], of_curve["linear"], strict=True)
    ]
    rows = [row(name, of_seeds) for name, of_seeds in found.items()]
    rows += [paper_row(name, values) for name, values in PAPER.items()]
    table = markdown_table(header("curve", POSITIONS), rows)
    about = s.describe(other_model("Vicuna-13B-v1.5, 40 layers, on MDQA with 10 documents, 500 questions"))
    tested = f"Bézier curve against linear interpolation, paired: p {', '.join(map(show_p, p))}.\n"
    summary = {"ours": found, "paper": PAPER, "p_bezier_against_linear": p}
    write_tables(s, "Table 16: a deeper model", [about, table, tested], summary)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
