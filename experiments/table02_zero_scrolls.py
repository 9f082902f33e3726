"""ZeroSCROLLS with factors from another search (Table 2).

    python experiments/table02_zero_scrolls.py --factors RUN/factors.json --data-folder DATA --limit 20

The paper's figures are for the validation splits, about 20 examples per column. Summaries are scored by the geometric mean of
ROUGE-1, -2 and -L over the corpus. QMSum is also read from its own repository's file.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import Benchmark, BenchmarkFlags, run_table
from grid import other_model, run_script

PAPER = {
    "Vicuna-7B-v1.5": {
        "baseline": "18.44 22.82 18.42 14.50 10.98 16.56 21.39 16.91",
        "MoICE": "22.29 32.34 13.31 14.79 13.61 16.22 22.60 19.30",
        "LPES": "21.47 33.37 14.39 15.53 11.52 16.91 22.24 19.35",
    },
    "LLaMA-2-7B-chat": {
        "baseline": "18.00 13.48 13.73 14.29 10.28 15.94 49.72 19.35",
        "MoICE": "19.62 15.10 14.69 14.79 10.25 16.80 50.22 20.21",
        "LPES": "18.20 15.23 13.99 15.04 14.93 17.37 52.28 21.01",
    },
    "StableBeluga-7B": {
        "baseline": "14.88 26.89 12.09 14.24 10.73 15.05 48.50 20.34",
        "MoICE": "18.14 36.89 14.35 15.76 7.990 15.97 44.50 21.94",
        "LPES": "18.98 34.19 13.06 15.46 9.910 16.65 46.61 22.12",
    },
    "Qwen2.5-7B": {
        "baseline": "24.76 22.92 14.69 16.25 9.780 14.85 53.66 22.42",
        "MoICE": "25.56 23.51 15.12 23.19 10.64 16.92 53.81 24.11",
        "LPES": "27.56 23.91 16.18 23.19 11.97 14.92 53.81 25.51",
    },
}
TITLES = {
    "gov_report": "GovRpt",
    "qasper": "Qasper",
    "summ_screen_fd": "SumScrFd",
    "qmsum": "QMSum",
    "narrative_qa": "NarrQA",
    "squality": "SQuALITY",
    "space_digest": "SpcDgst",
    "quality": "QuALITY",
    "book_sum_sort": "BookSumSort",
}
NOT_IN_PAPER = ("quality", "book_sum_sort")


def files_of(subset: str) -> tuple[str, ...]:
    """Possible paths of a subset's validation file: the benchmark's own .zip has SUBSET/validation.jsonl."""
    files = (f"**/{subset}_validation.jsonl*", f"**/{subset}/validation.jsonl*")
    return (*files, "**/qmsum/ALL_val.jsonl*", "**/qmsum/val.jsonl*") if subset == "qmsum" else files


COLUMNS = [
    Benchmark(title, subset, "zero_scrolls", files_of(subset), {"subset": subset}, in_paper=subset not in NOT_IN_PAPER)
    for subset, title in TITLES.items()
]


@dataclass(frozen=True, kw_only=True)
class Settings(BenchmarkFlags):
    """Which model, which factors, what to measure."""

    output_path: Path = Path("runs/table02")


def main(s: Settings) -> None:
    """Measure missing cells and write the tables."""
    about = other_model("Table 2, 7B models, factors found on MDQA, as printed")
    run_table(s, "ZeroSCROLLS (Table 2)", COLUMNS, PAPER, about)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
