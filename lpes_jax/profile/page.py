"""The files of a profile: the record of profile.json, the tables of profile.md and the page, and the plots."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lpes_jax.choices import ProfileTask
from lpes_jax.compilation import compilations
from lpes_jax.evaluation import BASELINE
from lpes_jax.profile.findings import RULER, Effective, changes, effective, fails_at_once, losses, ruler_mean, sentence
from lpes_jax.profile.grid import Column, Grid
from lpes_jax.report.plots import heat_maps, loss_by_position
from lpes_jax.report.tables import markdown_table
from lpes_jax.store.provenance import environment


def record_of(grid: Grid, text: dict[str, Any] | None, config: dict[str, Any], started: float) -> dict[str, Any]:
    """The contents of `profile.json`. `started` is the run's start, in seconds as in `time.time`."""
    plan, model = grid.plan, grid.loaded.identity["name"]
    names = {candidate.name: number for number, candidate in enumerate(grid.candidates)}
    titles = {name: model if name == BASELINE else f"{model} with {name}" for name in names}
    return {
        "effective_length": {
            name: {
                "reliable_up_to": _of_all(grid, number),
                "ruler_mean": ruler_mean(grid, number),
                "by_task": {task: asdict(effective(grid, task, number)) for task in plan.tasks if grid.usable(task)},
            }
            for name, number in names.items()
        },
        "says": {name: sentence(grid, titles[name], number) for name, number in names.items()},
        "fact_alone": {task: {"mean": mean, "interval": [low, high]} for task, (mean, low, high) in grid.ceiling.items()},
        "columns": [_column(grid, column, list(names)) for column in grid.columns.values()],
        "changes": changes(grid) if len(names) > 1 else [],
        "text_loss": text,
        "alpha_of_a_bound": grid.alpha,
        "config": config,
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_evaluation_time_seconds": round(time.time() - started, 3),
        "compilations": compilations(since=started),
    }


def _of_all(grid: Grid, candidate: int) -> int | None:
    """The smallest effective length of all tasks; None if one task has none, or no task can be judged."""
    lengths = [effective(grid, task, candidate).length for task in grid.plan.tasks if grid.usable(task)]
    known = [length for length in lengths if length is not None]
    return min(known) if known and len(known) == len(lengths) else None


def _column(grid: Grid, column: Column, names: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"task": column.name, "length": column.length}
    if not column.blocks:
        why = column.missing or "no time was left"
        if not grid.usable(column.name):
            why = f"{100 * grid.ceiling[column.name][0]:.0f} % right without a haystack"
        return record | {"missing": why}
    by_candidate = {
        name: {
            "status": grid.status(column, number),
            "accuracy": column.values[:, number].mean(axis=0).tolist(),
            "intervals": np.stack([column.low[number], column.high[number]], axis=1).tolist(),
            "losses": losses(grid, column, number),
        }
        for number, name in enumerate(names)
    }
    return record | {
        "items": column.task.num_items,
        "units": len(column.values),
        "questions_of_a_unit": column.questions_of_a_unit,
        "prompt_tokens": column.tokens,
        "tokens_saved": round(column.saved, 4),
        "seconds": round(sum(column.seconds), 3),
        "compiling": round(column.compiling, 3),
        **by_candidate,
    }


def draw(folder: Path, grid: Grid, record: dict[str, Any]) -> dict[str, Path]:
    """Draw the plots; returns them by caption."""
    pictures = {}
    for task in grid.plan.tasks:
        if any(grid.columns[task, length].blocks for length in grid.plan.lengths):
            caption = f"{task}: right answers in % by tokens of the prompt and position of the fact. Grey: not measured. "
            caption += "?: undecided whether it is above the threshold."
            pictures[caption] = _heat_map(folder, grid, task)
    if (text := record["text_loss"]) is not None:
        title = f"Loss of plain text by position, {text['windows']} windows: {Path(text['text']).name}"
        stem = folder / "text_loss"
        pictures["Loss of plain text by position"] = loss_by_position(stem, text["from_position"], text["nats_a_token"], title)[
            1
        ]
    return pictures


def _heat_map(folder: Path, grid: Grid, task: ProfileTask) -> Path:
    """The heat maps of a task, one per candidate."""
    maps, undecided, plan = {}, {}, grid.plan
    _, low, high = grid.ceiling[task]
    for number, candidate in enumerate(grid.candidates):
        accuracy = np.full((len(plan.positions), len(plan.lengths)), np.nan)
        unsure = np.zeros(accuracy.shape, bool)
        for index, length in enumerate(plan.lengths):
            column = grid.columns[task, length]
            if column.blocks:
                accuracy[:, index] = column.values[:, number].mean(axis=0)
                is_above = column.low[number] >= plan.threshold * high
                unsure[:, index] = ~is_above & (column.high[number] >= plan.threshold * low)
        maps[candidate.name], undecided[candidate.name] = accuracy, unsure
    title = f"{grid.loaded.identity['name']}: {task}"
    return heat_maps(folder / f"heat_{task}", plan.positions, plan.lengths, maps, undecided, title)[1]


def tables(grid: Grid, record: dict[str, Any]) -> str:
    """The profile as GitHub markdown, with the conclusions first."""
    blocks = [*record["says"].values(), *_effective_lengths(grid, record), *_losses(record)]
    missing: dict[tuple[str, str], list[str]] = {}
    for column in record["columns"]:
        if "missing" in column:
            missing.setdefault((column["task"], column["missing"]), []).append(f"{column['length']:,}")
    if missing:
        reasons = (f"{task} at {', '.join(lengths)} ({why})" for (task, why), lengths in missing.items())
        blocks.append(f"Not measured: {'; '.join(reasons)}.")
    if record["changes"]:
        blocks += _changes(record)
    if (text := record["text_loss"]) is not None:
        header = ["nats per token from position", *(f"{start:,}" for start in text["from_position"])]
        lines = [[name, *(f"{loss:.3f}" for loss in losses)] for name, losses in text["nats_a_token"].items()]
        blocks.append(_table(header, lines))
        blocks.append(f"Plain text: {text['text']}, {text['windows']} windows of {text['window']:,} tokens.")
    return "\n\n".join(blocks) + "\n"


def _effective_lengths(grid: Grid, record: dict[str, Any]) -> list[str]:
    header, lines = ["task", "without haystack, %", "reliable up to", "lost at", "by the means", "RULER's rule"], []
    for name, found in record["effective_length"].items():
        suffix = "" if name == BASELINE else f", {name}"
        for task in grid.plan.tasks:
            result = found["by_task"].get(task)
            ends = [_length(result[key]) for key in ("length", "lost_at", "estimate")] if result else ["-"] * 3
            if result is None:
                ends[0] = "not judged"
            elif result["length"] is None and not fails_at_once(grid, task, Effective(**result)):
                ends[0] = "not decided"
            lines.append([f"{task}{suffix}", _percent(grid.ceiling[task][0]), *ends, ""])
        lines.append([f"all{suffix}", "", _length(found["reliable_up_to"]), "", "", _length(found["ruler_mean"])])
    note = (
        "Reliable up to: the longest length, in tokens, up to which every position is above "
        f"{100 * grid.plan.threshold:g} % of the model's score without a haystack; -: not even the shortest; not decided: too "
        "few questions at the shortest; not judged: too few right answers without a haystack. All bounds hold together with "
        f"{100 * grid.plan.confidence:g} % confidence, for any number of questions. Lost at: the shortest length at which some "
        "position is below. By the means: the same without bounds. RULER's rule: the mean of all tasks and positions is at "
        f"least {100 * RULER:g} %."
    )
    return [_table(header, lines), note]


def _losses(record: dict[str, Any]) -> list[str]:
    header, lines = ["task, tokens", "answer format", "length", "position", "mean right, %", "worst position"], []
    for column in record["columns"]:
        for name in record["says"] if "missing" not in column else ():
            loss, suffix = column[name]["losses"], "" if name == BASELINE else f", {name}"
            low, high = map(_percent, loss["worst_interval"])
            worst = f"{loss['worst_position']} %: {_percent(loss['worst'])} [{low}, {high}]"
            parts = [_percent(loss[key]) for key in ("answer_format", "length", "position", "mean")]
            lines.append([f"{column['task']}, {column['length']:,}{suffix}", *parts, worst])
    note = (
        "Points (of 100) lost to the answer format (wrong even without a haystack), to the length (at the best position), and "
        "to the position (best minus worst)."
    )
    return [_table(header, lines), note] if lines else []


def _changes(record: dict[str, Any]) -> list[str]:
    header, lines = ["task, tokens, position", "before, %", "after, %", "units better", "worse", "p (Holm)"], []
    for change in record["changes"]:
        cells = [_percent(change["before"]), _percent(change["after"]), str(change["better"]), str(change["worse"])]
        cells.append(_p(change["p_holm"]))
        lines.append([f"{change['task']}, {change['length']:,}, {change['position']} %", *cells])
    note = (
        "The same questions without and with the factors. p: McNemar's test over the units (haystacks) that changed, valid for "
        "any number of them, with Holm's correction for all cells."
    )
    return [_table(header, lines), note]


def _table(header: list[str], lines: list[list[str]]) -> str:
    return markdown_table([header, ["---", *["---:"] * (len(header) - 1)], *lines])


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _length(length: int | None) -> str:
    return "-" if length is None else f"{length:,}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"
