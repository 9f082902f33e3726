"""The conclusions of a grid: effective lengths, losses, changes by factors, and a summary sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpes_jax.profile.grid import Column, Grid
from lpes_jax.statistics import holm, mcnemar, sequential_mcnemar

RULER = 0.856  # RULER's threshold: the score of Llama-2-7B at 4,096 tokens, averaged over its tasks


@dataclass(frozen=True)
class Effective:
    """The effective length of a task for a candidate.

    Attributes:
        length: The longest length up to which every position is above the threshold, at the required confidence; None if not
            even the shortest is.
        lost_at: The shortest length at which some position is below the threshold, at that confidence; None if there is none.
        estimate: Like `length`, but by the means, without bounds.
    """

    length: int | None
    lost_at: int | None
    estimate: int | None


def effective(grid: Grid, name: str, candidate: int) -> Effective:
    """The effective length of a task for a candidate, by its number."""
    columns = [grid.columns[name, length] for length in sorted(grid.plan.lengths)]
    columns = [column for column in columns if column.task is not None]  # the others are too short for a question
    measured = [column for column in columns if column.blocks]
    needed = grid.plan.threshold * grid.ceiling[name][0]
    worst = {column.length: float(column.values[:, candidate].mean(axis=0).min()) for column in measured}
    statuses = {column.length: grid.status(column, candidate) for column in measured}
    return Effective(
        length=_longest(columns, lambda column: statuses.get(column.length) == "above"),
        lost_at=next((column.length for column in measured if statuses[column.length] == "below"), None),
        estimate=_longest(columns, lambda column: worst.get(column.length, -1.0) >= needed),
    )


def ruler_mean(grid: Grid, candidate: int) -> int | None:
    """RULER's effective length: the longest up to which the mean over all tasks and positions is at least 85.6 %.

    Tasks that fail even without a haystack count as 0, as in RULER. A length counts only if all other tasks were measured.
    """
    means: list[float] = []
    for length in sorted(grid.plan.lengths):
        columns = [grid.columns[name, length] for name in grid.plan.tasks]
        if any(not column.blocks and column.missing is None and grid.usable(column.name) for column in columns):
            break
        counted = [column for column in columns if column.blocks or column.missing is None]
        scores = [column.values[:, candidate].mean() if column.blocks else 0.0 for column in counted]
        if not scores:
            continue
        means.append(float(np.mean(scores)))
        if means[-1] < RULER:
            break
    passed = [length for length, mean in zip(sorted(grid.plan.lengths), means, strict=False) if mean >= RULER]
    return passed[-1] if passed else None


def _longest(columns: Sequence[Column], passes: Callable[[Column], bool]) -> int | None:
    longest = None
    for column in columns:
        if not passes(column):
            break
        longest = column.length
    return longest


def losses(grid: Grid, column: Column, candidate: int) -> dict[str, Any]:
    """Losses of a column, in 0 ... 1: by the answer format, by the length (at the best position), and by the position; also the
    mean, and the worst position."""
    by_position = column.values[:, candidate].mean(axis=0)
    ceiling, best, worst = grid.ceiling[column.name][0], float(by_position.max()), float(by_position.min())
    worst_slot = int(by_position.argmin())
    return {
        "answer_format": 1 - ceiling,
        "length": max(0.0, ceiling - best),
        "position": best - worst,
        "mean": float(by_position.mean()),
        "worst": worst,
        "worst_interval": [float(column.low[candidate, worst_slot]), float(column.high[candidate, worst_slot])],
        "worst_position": grid.plan.positions[worst_slot],
    }


def changes(grid: Grid) -> list[dict[str, Any]]:
    """What the second candidate changes in each measured cell, on the same questions.

    Units are paired: counts of those that it answers better and worse. p is McNemar's anytime-valid p (`sequential_mcnemar`)
    over all units, p_holm its Holm correction over all cells. p_mcnemar is the exact test on the first block, whose size does
    not depend on results.
    """
    found = []
    for column in grid.columns.values():
        for slot, position in enumerate(grid.plan.positions if column.blocks else ()):
            difference = column.values[:, 1, slot] - column.values[:, 0, slot]
            first = difference[: len(difference) // column.blocks]
            found.append(
                {
                    "task": column.name,
                    "length": column.length,
                    "position": position,
                    "before": float(column.values[:, 0, slot].mean()),
                    "after": float(column.values[:, 1, slot].mean()),
                    "better": int((difference > 0).sum()),
                    "worse": int((difference < 0).sum()),
                    "p": sequential_mcnemar(int((difference > 0).sum()), int((difference < 0).sum())),
                    "p_mcnemar": mcnemar(first > 0, first < 0),
                }
            )
    for change, p in zip(found, holm([change["p"] for change in found]), strict=True):
        change["p_holm"] = p
    return found


def sentence(grid: Grid, model: str, candidate: int) -> str:
    """The profile's conclusion in a few sentences."""
    usable = [name for name in grid.plan.tasks if grid.usable(name)]
    if not usable:
        best = max(mean for mean, _, _ in grid.ceiling.values())
        return (
            f"{model} answers none of these tasks even without a haystack (at best {100 * best:.0f} %), so positions cannot be "
            "judged."
        )
    by_task = {name: effective(grid, name, candidate) for name in usable}
    shortest = f"{min(grid.plan.lengths):,}"
    lengths = sorted({result.length for result in by_task.values() if result.length}, reverse=True)
    found = [
        f"{length:,} tokens ({_named(by_task, lambda name, length=length: by_task[name].length == length)})"
        for length in lengths
    ]
    lost = _named(by_task, lambda name: fails_at_once(grid, name, by_task[name]))
    unsure = _named(by_task, lambda name: by_task[name].length is None and not fails_at_once(grid, name, by_task[name]))
    clauses = []
    if found:
        clauses.append(f"{model} finds a fact at every position in prompts of up to {', '.join(found)}")
    if lost and found:
        clauses.append(f"in {lost} not even in prompts of {shortest} tokens")
    elif lost:
        clauses.append(f"{model} does not find a fact at every position, not even in prompts of {shortest} tokens ({lost})")
    parts = [f"{'; '.join(clauses)}, with {100 * grid.plan.confidence:g} % confidence."] if clauses else []
    if unsure and clauses:
        parts.append(f"At {shortest} tokens, {unsure} had too few questions for a decision.")
    elif unsure:
        parts.append(
            f"Whether {model} finds a fact at every position in prompts of {shortest} tokens is undecided ({unsure}): "
            f"too few questions for {100 * grid.plan.confidence:g} % confidence."
        )
    parts += _first_loss(grid, by_task, candidate)
    if failed := [f"{name} ({100 * grid.ceiling[name][0]:.0f} %)" for name in grid.plan.tasks if name not in usable]:
        parts.append(f"Not judged, with too few right answers even without a haystack: {', '.join(failed)}.")
    return " ".join(parts)


def fails_at_once(grid: Grid, name: str, result: Effective) -> bool:
    """Whether some position is below the threshold at the shortest length that holds a question of the task."""
    lengths = [length for length in grid.plan.lengths if grid.columns[name, length].task is not None]
    return result.lost_at is not None and result.lost_at == min(lengths)


def _named(by_task: dict[str, Effective], chosen: Callable[[str], bool]) -> str:
    return ", ".join(filter(chosen, by_task))


def _first_loss(grid: Grid, by_task: dict[str, Effective], candidate: int) -> list[str]:
    lost = {name: result.lost_at for name, result in by_task.items() if result.lost_at is not None}
    if not lost:
        return []
    name = min(lost, key=lambda task: (lost[task], task))
    loss = losses(grid, grid.columns[name, lost[name]], candidate)
    return [
        f"The first certain loss is {name} at {lost[name]:,} tokens, with the fact at {loss['worst_position']} %: "
        f"{100 * loss['worst']:.0f} % right, against {100 * grid.ceiling[name][0]:.0f} % without a haystack."
    ]
