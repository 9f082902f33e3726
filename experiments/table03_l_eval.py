"""L-Eval with factors from another search (Table 3).

    python experiments/table03_l_eval.py --factors RUN/factors.json --data-folder DATA --limit 50

The paper's four closed-ended columns, by the benchmark's `exam` score (some of several right letters score a quarter, and an
output without a letter counts as A). Open-ended files, if present, are measured too, by F1 or ROUGE.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import Benchmark, BenchmarkFlags, run_table
from grid import other_model, run_script

from lpes_jax.tasks.l_eval import SUBSETS

PAPER = {
    "Vicuna-7B-v1.5": {
        "baseline": "37.21 38.12 38.00 57.90 42.81",
        "MoICE": "46.65 43.71 39.33 57.20 46.72",
        "LPES": "40.41 42.57 40.67 58.20 45.46",
    },
    "LLaMA-2-7B-chat": {
        "baseline": "34.89 37.62 55.00 60.93 47.11",
        "MoICE": "42.50 42.08 56.13 64.84 50.72",
        "LPES": "37.50 42.16 63.00 63.50 51.52",
    },
    "Qwen2.5-7B": {
        "baseline": "45.47 62.43 66.00 60.87 58.69",
        "MoICE": "48.13 64.28 67.33 66.00 61.44",
        "LPES": "48.51 66.43 69.28 66.42 62.66",
    },
}
TITLES = {"coursera": "Coursera", "quality": "QuALITY", "tpo": "TOEFL", "sci_fi": "SFiction"}
COLUMNS = [
    Benchmark(TITLES.get(subset, subset), subset, "l_eval", (f"**/{subset}.jsonl*",), {"subset": subset}, subset in TITLES)
    for subset in dict.fromkeys((*TITLES, *SUBSETS))
]


@dataclass(frozen=True, kw_only=True)
class Settings(BenchmarkFlags):
    """Which model, which factors, what to measure."""

    output_path: Path = Path("runs/table03")


def main(s: Settings) -> None:
    """Measure missing cells and write the tables."""
    about = other_model("Table 3, 7B models, factors found on MDQA, as printed")
    run_table(s, "L-Eval (Table 3)", COLUMNS, PAPER, about)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
