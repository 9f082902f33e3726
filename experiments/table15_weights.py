"""Table 15: three sets of weights of the begin, middle and end positions in the GA's fitness.

    python experiments/table15_weights.py --task mdqa --data nq-open-oracle.jsonl.gz --model MODEL

Equal weights are 0.333 0.333 0.334: they have to sum to 1.
"""

from dataclasses import dataclass
from pathlib import Path

from grid import GridFlags, figures, header, markdown_table, other_model, paper_row, row, run_grid, run_script, write_tables

WEIGHTS = ((0.333, 0.333, 0.334), (0.1, 0.3, 0.6), (0.2, 0.3, 0.5))
PAPER = {
    "baseline": "70.4 58.0 55.4 55.4 60.4 59.9",
    "<0.333, 0.333, 0.333>": "73.2 62.4 60.2 58.8 58.2 62.6",
    "<0.1, 0.3, 0.6>": "70.6 60.2 60.8 61.0 62.0 63.0",
    "<0.2, 0.3, 0.5>": "71.4 62.2 62.0 61.0 61.6 63.2",
}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what."""

    output_path: Path = Path("runs/table15_weights")


def main(s: Settings) -> None:
    """Run the three searches and write the table."""
    names = {weights: "-".join(map(str, weights)) for weights in WEIGHTS}
    cells = {f"{name}/seed{seed}": s.search(weights=weights, seed=seed) for weights, name in names.items() for seed in s.seeds}
    records = run_grid(cells, s)
    of_weights = {weights: [records[f"{name}/seed{seed}"] for seed in s.seeds] for weights, name in names.items()}
    found = {"baseline": [figures(record, "baseline") for record in of_weights[WEIGHTS[0]]]}
    for weights, of_seeds in of_weights.items():
        shown = f"<{', '.join(map(str, weights))}>"
        found[f"{shown}: tuned uniform factor"] = [figures(record, "uniform") for record in of_seeds]
        found[shown] = [figures(record) for record in of_seeds]
    rows = [row(name, of_seeds) for name, of_seeds in found.items()]
    rows += [paper_row(name, values) for name, values in PAPER.items()]
    table = markdown_table(header("weights of begin, middle, end", s.search().questions.positions), rows)
    about = s.describe(other_model("Vicuna-7B-v1.5 on MDQA with 10 documents, 500 questions"))
    write_tables(s, "Table 15: weights of the positions", [about, table], {"ours": found, "paper": PAPER})


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
