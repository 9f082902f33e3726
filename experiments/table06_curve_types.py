"""Table 6: Bézier curve, linear interpolation and step function through the control points, by the same GA.

    python experiments/table06_curve_types.py --task mdqa --data nq-open-oracle.jsonl.gz --model MODEL

Bézier is LPES; all three have four control points and the same sizes.
"""

from dataclasses import dataclass
from pathlib import Path

from grid import GridFlags, figures, header, markdown_table, other_model, paper_row, row, run_grid, run_script, write_tables

CURVES = {"linear": "linear interpolation", "step": "step function", "bezier": "Bézier curve"}
PAPER = {
    "baseline": "70.4 58.0 55.4 55.4 60.4 59.92",
    "LPES (linear interpolation)": "71.8 61.0 62.2 60.0 60.6 63.12",
    "LPES (step function)": "71.6 60.2 59.4 59.2 60.4 62.16",
    "LPES (Bézier curve)": "71.4 62.2 62.0 61.0 61.6 63.64",
}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what."""

    output_path: Path = Path("runs/table06_curve_types")


def main(s: Settings) -> None:
    """Run the three searches and write the table."""
    cells = {f"{curve}/seed{seed}": s.search(curve=curve, seed=seed) for curve in CURVES for seed in s.seeds}
    records = run_grid(cells, s)
    of_curve = {curve: [records[f"{curve}/seed{seed}"] for seed in s.seeds] for curve in CURVES}
    found = {
        "baseline": [figures(record, "baseline") for record in of_curve["bezier"]],
        "tuned uniform factor": [figures(record, "uniform") for record in of_curve["bezier"]],
        **{f"LPES ({CURVES[curve]})": [figures(record) for record in of_curve[curve]] for curve in CURVES},
    }
    rows = [row(name, of_seeds) for name, of_seeds in found.items()]
    rows += [paper_row(name, values) for name, values in PAPER.items()]
    table = markdown_table(header("method", s.search().questions.positions), rows)
    about = s.describe(other_model("Vicuna-7B-v1.5 on MDQA with 10 documents, 500 questions"))
    write_tables(s, "Table 6: curve types", [about, table], {"ours": found, "paper": PAPER})


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
