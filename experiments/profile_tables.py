"""The tables of the page on three profiles, from the records in experiments/results/profile; `page_figures.py` puts them there.

Accuracies and losses in % and points, lengths in tokens.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grid import markdown_table

RESULTS = Path(__file__).with_name("results") / "profile"
SHORT = {"SmolLM2-135M": "SmolLM2", "Qwen2.5-Coder-0.5B": "Qwen 0.5B", "Qwen2.5-Coder-1.5B": "Qwen 1.5B"}  # in long tables
MODELS = {
    "smollm2": "SmolLM2-135M",
    "qwen2.5_coder_0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5_coder_1.5b": "Qwen2.5-Coder-1.5B",
}
ALONE, SIMILAR = "single_1", ("kv", "multikey_2", "multikey_3")
SPLIT_AT = 8192  # tokens
PARTS = (0, 1, 3, 5, 7)  # of the eight parts of a window


def profile_conclusion() -> str:
    """What a reader should take from the three profiles."""
    found = {title: _by_task(record) for title, record in _records()}
    alone = _and([f"{tasks[ALONE]['length']:,}" for tasks in found.values()])
    shown = {title: [tasks[task]["length"] or 0 for task in SIMILAR] for title, tasks in found.items()}
    [(best, length)] = [(title, min(lengths)) for title, lengths in shown.items() if all(lengths)]
    return (
        f"**A lone needle overstates the length that a model can use. {_and(list(found))} find it at every position in prompts "
        f"of up to {alone} tokens. Among similar facts, only {best} is shown to be reliable, in prompts of up to {length:,} "
        "tokens.**"
    )


def profile_lengths() -> str:
    """Reliable up to, lost at, and RULER's rule, by task and model."""
    records = dict(_records())
    rows = []
    for task in next(iter(records.values()))["fact_alone"]:
        rows.append([f"`{task}`", *(_ends(record, task) for record in records.values())])
    rules = [record["effective_length"]["baseline"]["ruler_mean"] for record in records.values()]
    rows.append(["RULER's rule", *("none" if rule is None else f"{rule:,}" for rule in rules)])
    return _left(_table(["reliable up to / lost at", *records], rows))


def profile_worst() -> str:
    """The worst position by length: accuracy, "?" if the length is undecided, and the position if it is only one."""
    lengths = sorted({column["length"] for _, record in _records() for column in record["columns"]})
    rows = []
    for title, record in _records():
        for task in _by_task(record):
            cells = {column["length"]: _worst(column) for column in record["columns"] if column["task"] == task}
            rows.append([f"{SHORT[title]}, `{task}`", *(cells.get(length, "-") for length in lengths)])
    return _table(["% right", *(f"{length:,}" for length in lengths)], rows)


def profile_losses() -> str:
    """Points lost to the answer format, the length and the position, at one length."""
    rows = []
    for title, record in _records():
        for column in record["columns"]:
            if column["length"] == SPLIT_AT and "baseline" in column:
                lost = column["baseline"]["losses"]
                parts = (f"{100 * lost[name]:.0f}" for name in ("answer_format", "length", "position"))
                asked = f"{column['units'] * column['questions_of_a_unit']}"
                rows.append([f"{SHORT[title]}, `{column['task']}`", *parts, asked])
    head = [f"{SPLIT_AT:,} tokens", "format", "length", "position", "asked"]
    return _table(head, rows)


def profile_text() -> str:
    """The loss of plain text by position."""
    columns = []
    for _, record in _records():
        text = record["text_loss"]
        losses = [f"{text['nats_a_token']['baseline'][part]:.3f}" for part in PARTS]
        columns.append([f"{text['window']:,}", f"{text['windows']}", *losses])
    return _by_model(["tokens of a window", "windows", *(f"part {part + 1}, nats per token" for part in PARTS)], columns)


def profile_measured() -> str:
    """How the profiles were measured."""
    columns = []
    for _, record in _records():
        measured = [column for column in record["columns"] if "baseline" in column]
        asked = sum(column["units"] * column["questions_of_a_unit"] for column in measured)
        columns.append(
            [
                f"{record['devices']['count']} x {record['devices']['kind']}",
                f"{record['config']['model_identity']['dtype']}",
                f"{record['versions']['jax']}",
                record["date"][:10],
                f"{record['config']['minutes']:g}",
                f"{record['total_evaluation_time_seconds']:.0f}",
                f"{record['compilations']['seconds']:.0f}",
                f"{asked * len(record['config']['positions']):,}",
            ]
        )
    rows = ["card", "dtype", "jax", "date", "minutes allowed", "seconds taken", "of these compiling", "prompts"]
    return _by_model(rows, columns)


def _records() -> Iterator[tuple[str, dict[str, Any]]]:
    for folder, title in MODELS.items():
        yield title, json.loads((RESULTS / folder / "profile.json").read_text(encoding="utf-8"))


def _by_task(record: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    return record["effective_length"]["baseline"]["by_task"]


def _ends(record: dict[str, Any], task: str) -> str:
    """The ends of a task: the longest reliable length, and the shortest at which facts are lost."""
    if (found := _by_task(record).get(task)) is None:
        return "not judged"
    reliable, lost = found["length"], found["lost_at"]
    shortest = min(record["config"]["lengths"])
    none = "none" if lost == shortest else "undecided"
    return f"{none if reliable is None else f'{reliable:,}'} / {'-' if lost is None else f'{lost:,}'}"


def _worst(column: dict[str, Any]) -> str:
    if "baseline" not in column:
        return "-"
    lost, unsure = column["baseline"]["losses"], column["baseline"]["status"] == "undecided"
    is_one = column["baseline"]["accuracy"].count(lost["worst"]) == 1
    return f"{100 * lost['worst']:.0f}{'?' * unsure}" + f" ({lost['worst_position']})" * is_one


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _by_model(names: list[str], columns: list[list[str]]) -> str:
    """A table with one column per model."""
    return _left(_table(["", *MODELS.values()], [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]))


def _left(table: str) -> str:
    """The table with cells at the left, which may wrap, so that phones show all of it."""
    return table.replace("---:", ":---")


def _table(head: list[str], rows: list[list[str]]) -> str:
    return markdown_table(head, rows).rstrip("\n")


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(profile_conclusion, profile_lengths, profile_worst),
        *(profile_losses, profile_text, profile_measured),
    )
}
