"""L-Eval with prompts of up to 15,872 tokens and factors from another search (Table 17).

    python experiments/table17_long.py --factors RUN/factors.json --data-folder DATA --limit 50

Table 3's columns with a longer limit. A model with a smaller window gets what fits together with the tokens to generate; the
table of prompts says how many were cut, and their lengths.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import BenchmarkFlags, run_table
from grid import other_model, run_script
from table03_l_eval import COLUMNS

PAPER = {
    "Vicuna-13B-v1.5-16k": {
        "baseline": "69.6 51.4 33.3 57.1 52.9",
        "MoICE": "67.4 55.6 35.7 52.6 52.8",
        "LPES": "70.6 54.4 36.0 59.4 55.1",
    },
    "Qwen2.5-7B": {
        "baseline": "59.8 66.3 76.6 71.8 68.6",
        "MoICE": "59.8 66.3 78.7 73.0 69.5",
        "LPES": "63.8 69.1 88.9 72.9 73.7",
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings(BenchmarkFlags):
    """Which model, which factors, what to measure."""

    output_path: Path = Path("runs/table17")
    max_prompt_tokens: int = 15_872
    """Longer prompts lose the end of their document."""


def main(s: Settings) -> None:
    """Measure missing cells and write the tables."""
    about = other_model("Table 17, factors found on MDQA, as printed")
    run_table(s, "L-Eval at 16k tokens (Table 17)", COLUMNS, PAPER, about)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
