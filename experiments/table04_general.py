"""The effect of factors from another search on general ability (Table 4): questions that need no long context.

    python experiments/table04_general.py --factors RUN/factors.json --data-folder DATA --limit 1000

MMLU (test) and C-Eval (val), five shots, by the likeliest letter; the paper names neither split nor shots. In addition,
questions of lost-in-the-middle's nq-open-oracle file without any document and with only the gold one. Of these the test part is
used, because factors may have been searched on the rest.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import Benchmark, BenchmarkFlags, run_table
from grid import other_model, run_script

PAPER = {
    "Vicuna-7B-v1.5": {"baseline": "49.90 49.42", "LPES": "49.00 49.33"},
    "StableBeluga-7B": {"baseline": "51.50 34.78", "LPES": "51.30 34.63"},
}
_ORACLE = ("**/nq-open-oracle.jsonl*",)
COLUMNS = [
    Benchmark("MMLU", "mmlu", "mmlu", ("**/test/*_test.csv",), levels=2),
    Benchmark("C-Eval", "ceval", "ceval", ("**/val/*_val.csv",), levels=2),
    Benchmark("NQ, closed book", "nq_closed_book", "mdqa", _ORACLE, {"mode": "closed_book"}, in_paper=False, split="test"),
    Benchmark("NQ, gold document", "nq_oracle", "mdqa", _ORACLE, {"mode": "oracle"}, in_paper=False, split="test"),
]


@dataclass(frozen=True, kw_only=True)
class Settings(BenchmarkFlags):
    """Which model, which factors, what to measure."""

    output_path: Path = Path("runs/table04")
    limit: int | None = 1000
    """Questions of each column, evenly spaced over the file or subjects; a larger number means all."""


def main(s: Settings) -> None:
    """Measure missing cells and write the tables."""
    run_table(s, "General ability (Table 4)", COLUMNS, PAPER, other_model("Table 4, factors found on MDQA"))


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
