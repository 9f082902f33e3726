"""The index of results/: one line per JSON file, generated only from the file's contents.

    python experiments/results_index.py              # writes the index into results/README.md, between its two marks

A missing entry is "-". Accuracies are in percent; ± is the standard error over questions or, with several seeds, the sample
standard deviation over seeds. Differences (found against baseline) have the file's unit: points in Tables 2, 3, 4 and 17, nats
per token for plain text, else shares of 1.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grid import markdown_table, row, show_p

from lpes_jax.store.files import write_text

RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- index: python experiments/results_index.py -->\n", "<!-- end of the index -->\n"
MOST = 6  # figures per line
FLAGS = (
    *("model", "preset", "algorithm", "task", "num_pairs", "num_documents", "limit", "test_limit"),
    *("lengths", "minutes", "seed"),
)


def index() -> str:
    """The table, in Markdown."""
    rows = []
    for path in sorted(RESULTS.rglob("*.json")):
        if path.name != "factors.json":
            name, record = path.relative_to(RESULTS).as_posix(), json.loads(path.read_text(encoding="utf-8"))
            shown = name.removesuffix("/summary.json").removesuffix("/results.json")
            told = [f"[{shown}]({name})", figures_of(record), command_of(record), card_of(record), date_of(record)]
            rows.append([cell.replace("|", "\\|") for cell in told])
    return markdown_table(["result", "figures", "command or flags", "card", "date"], rows).replace("---:", "---")


def figures_of(record: Mapping[str, Any]) -> str:
    """The figures with their intervals; of many, those of the baseline and LPES, or else the lowest to the highest."""
    found = list(accuracies(record))
    if len(found) > MOST:
        named = [figure for figure in found if figure[0].rpartition(", ")[2] in ("baseline", "lpes")]
        if not 2 <= len(named) <= MOST:
            (low, _, least), (high, _, most) = (
                min(found, key=lambda figure: figure[1]),
                max(found, key=lambda figure: figure[1]),
            )
            return f"{len(found)} rows, from {least} ({low}) to {most} ({high})"
        found = named
    if not found:
        found = list(differences(record))
        if len(found) > MOST:
            return f"{len(found)} paired differences"
    return "; ".join(f"{title} {text}" for title, _, text in found or speeds(record)) or reliable_lengths(record) or "-"


def accuracies(record: Any, title: str = "") -> Iterator[tuple[str, float, str]]:
    """Each set of accuracies below the record: title, mean, and mean with its interval."""
    if isinstance(record, list) and record and all(isinstance(entry, dict) and "acc_by_position" in entry for entry in record):
        text = row("", record)[-2]
        yield title, float(text.split()[0]), text
    elif isinstance(record, dict) and "acc_by_position" in record:
        yield from accuracies([record], title)
    elif isinstance(record, dict) and {"mean", "std"} <= record.keys():
        yield title, record["mean"], f"{record['mean']:.1f} (± {record['std']:.2f} over positions)"
    elif isinstance(record, dict):
        for name, entry in record.items():
            if name not in ("results", "paper", "config"):
                told = title if name in ("methods", "ours", "figures", "grid") else ", ".join(filter(None, (title, name)))
                yield from accuracies(entry, told)


def differences(record: Any, title: str = "") -> Iterator[tuple[str, float, str]]:
    """Each paired difference below the record: title, value, and value with its standard error and p."""
    if isinstance(record, dict) and {"difference", "standard_error", "p"} <= record.keys():
        error = "" if record["standard_error"] is None else f" ± {record['standard_error']:.4f}"
        yield title, record["difference"], f"{record['difference']:+.4f}{error} (p {show_p(record['p'])})"
    elif isinstance(record, dict):
        for name, entry in record.items():
            yield from differences(entry, ", ".join(filter(None, (title, name))))
    elif isinstance(record, list):
        for entry in record:
            if isinstance(entry, dict):
                names = [entry[name] for name in ("factors", "model", "target", "text") if isinstance(entry.get(name), str)]
                yield from differences(entry, ", ".join(filter(None, (title, *names))))


def speeds(record: Mapping[str, Any]) -> Iterator[tuple[str, float, str]]:
    """The benchmarks' entries at the top level of a record."""
    for name in ("ratio", "gpu_seconds", "agreement", "fitness"):
        if isinstance(record.get(name), int | float):
            yield name.replace("_", " "), record[name], f"{record[name]:.4g}"
    for entry in record.get("scaling", ()):
        yield f"{entry['devices']} devices,", entry["prompts_a_second"], f"{entry['prompts_a_second']:.0f} prompts/s"


def reliable_lengths(record: Mapping[str, Any]) -> str:
    """The lengths of a profile up to which a task is reliable at every position."""
    by_task = record.get("effective_length", {}).get("baseline", {}).get("by_task", {})
    found = [f"{task} {ends['length']:,}" for task, ends in by_task.items() if ends["length"] is not None]
    return f"reliable up to (tokens): {', '.join(found) or 'none'}" if by_task else ""


def command_of(record: Mapping[str, Any]) -> str:
    """The command, or its flags as far as the record has them."""
    if isinstance(record.get("command"), str):
        return f"`{record['command']}`"
    given = record.get("config") or record.get("settings") or {}
    shown = {name: given[name] for name in FLAGS if given.get(name) not in (None, [], "")}
    flags = (f"--{name.replace('_', '-')} {flag(value)}" for name, value in shown.items())
    return f"`{' '.join(flags)}`" if shown else "-"


def flag(value: Any) -> str:
    """A flag's value as on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def nested(record: Any, name: str) -> Iterator[Any]:
    """All values under a name, at any depth."""
    if isinstance(record, dict):
        for key, entry in record.items():
            if key == name:
                yield entry
            yield from nested(entry, name)


def card_of(record: Mapping[str, Any]) -> str:
    """The devices of the measurement."""
    devices = [f"{device['count']} x {device['kind']}" for device in nested(record, "devices") if isinstance(device, dict)]
    return (
        ", ".join(dict.fromkeys([*devices, *(device for device in nested(record, "device") if isinstance(device, str))])) or "-"
    )


def date_of(record: Mapping[str, Any]) -> str:
    """The day of the newest part."""
    return max((date[:10] for date in nested(record, "date") if isinstance(date, str)), default="-")


def indexed(text: str) -> str:
    """The README with a new index between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{index()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    readme = RESULTS / "README.md"
    write_text(readme, indexed(readme.read_text(encoding="utf-8")))
