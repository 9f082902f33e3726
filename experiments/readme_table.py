"""The results table of the README, from the JSON files of experiments/results/gains/smollm2_kl.

Examples:
  python experiments/readme_table.py             print the table
  python experiments/readme_table.py --write     put it into the README, between its two marks

A test compares the README with this table. Accuracy in %, with the standard error over questions; with several seeds, each
question counts with its mean.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from lpes_jax.statistics import standard_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results/gains/smollm2_kl"
MARKS = ("<!-- results: experiments/readme_table.py -->", "<!-- end of results -->")
SEEDS = range(3)
COLUMNS = {"as it is": ["baseline"]} | {
    method: [f"{method}_seed{seed}" for seed in SEEDS] for method in ("factors", "gains", "both")
}
ROWS = {
    "10 key-value pairs": ("kv, 10 pairs", True),
    "30 key-value pairs": ("kv, 30 pairs", False),
    "needle in 160 sentences": ("needle, 160 sentences", False),
    "10 documents, gold answer in the output": ("mdqa, 10 documents", True),
    "gold document alone": ("mdqa, gold document alone", False),
    "fiction, windows of 8,192, nats a token": ("plain text, fiction, windows of 8192", False),
}


def table() -> str:
    """The table in Markdown, one row for each of ROWS."""
    records = {name: json.loads((RESULTS / f"{name}.json").read_text()) for names in COLUMNS.values() for name in names}
    lines = [f"| | searched | {' | '.join(COLUMNS)} |", "| --- | --- |" + " ---: |" * len(COLUMNS)]
    for title, (target, searched) in ROWS.items():
        cells = []
        for names in COLUMNS.values():
            scores = np.mean([np.array(records[name]["targets"][target]["scores"], float) for name in names], axis=0)
            error = standard_error(scores)
            is_text = target.startswith("plain text")
            cells.append(f"{scores.mean():.3f} ± {error:.3f}" if is_text else f"{100 * scores.mean():.1f} ± {100 * error:.1f}")
        lines.append(f"| {title} | {'yes' if searched else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    if not parser.parse_args().write:
        print(table())
        return
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    readme.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
