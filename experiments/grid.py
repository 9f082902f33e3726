"""What the experiments share: named searches run one after the other into one folder, resumable, and tables of their figures.

    cells = {"ga": preset("paper", **common), "gradient": preset("default", algorithm="gradient", **common)}
    records = run_grid(cells, output_path)              # a folder per cell; cells that are finished are not run again
    write_tables(output_path, title, [row(name, record) for name, record in records.items()])

`--part 1/2` runs every second cell: one process a GPU, each on its part, and a last call without it collects the tables.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpes_jax.factors import write_json
from lpes_jax.search import SearchSettings, run_search


def run_grid(cells: Mapping[str, SearchSettings], output_path: Path, part: str = "0/1") -> dict[str, dict[str, Any]]:
    """Run the cells of a part that have no results yet; returns the records of all that have: results, search, factors."""
    at, of = map(int, part.split("/"))
    for number, (name, settings) in enumerate(cells.items()):
        folder = output_path / name
        if number % of == at and not (folder / "results.json").exists():
            begun = (folder / "history.jsonl").exists()
            print(f"== {name}", flush=True)
            run_search(replace(settings, output_path=folder, resume=begun))
    return {name: record_of(output_path / name) for name in cells if (output_path / name / "results.json").exists()}


def record_of(folder: Path) -> dict[str, Any]:
    """What a finished search says about itself."""
    factors, results = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("factors.json", "results.json"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"factors": factors, "results": results, "history": history}


def methods_of(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Title of a length -> method -> figures; a search on one length has the title ''."""
    methods = record["results"]["methods"]
    return {"": methods} if "baseline" in methods else methods


def percent(figures: Mapping[str, Any]) -> list[str]:
    """Accuracy at each position, then mean and standard error, in percent."""
    by_position = [f"{100 * value:.1f}" for value in figures["acc_by_position"].values()]
    return [*by_position, f"{100 * figures['acc,none']:.1f} ± {100 * figures['acc_stderr,none']:.1f}"]


def p_value(figures: Mapping[str, Any]) -> str:
    """p against the baseline."""
    p = figures.get("p_against_baseline,none")
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write_tables(output_path: Path, title: str, tables: Sequence[str], summary: Any) -> None:
    """`tables.md` and `summary.json`, printed as well; whole or not at all."""
    text = f"# {title}\n\n" + "\n".join(tables)
    temporary = output_path / "tables.md.part"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, output_path / "tables.md")
    write_json(output_path / "summary.json", summary)
    print(text)
