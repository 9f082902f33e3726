"""What a grid says: effective lengths, what is answer format and what is position, what factors change, in one sentence
first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpes_jax.profile.grid import Column, Grid
from lpes_jax.statistics import holm, mcnemar, sequential_mcnemar

RULER = 0.856  # its threshold: what Llama-2-7B has at 4,096 tokens, the mean of its tasks


@dataclass(frozen=True)
class Effective:
    """Of a task and a candidate. `length`: the longest at which, and at all shorter ones, every position is above the threshold
    with the confidence asked for; None where not even the shortest is. `lost_at`: the shortest at which some position is below
    with that confidence; None where there is none. `estimate`: the longest by the means as they are, without bounds."""

    length: int | None
    lost_at: int | None
    estimate: int | None


def effective(grid: Grid, name: str, candidate: int) -> Effective:
    columns = [grid.columns[name, length] for length in sorted(grid.plan.lengths)]
    columns = [it for it in columns if it.task is not None]  # the others are too short to hold a question
    measured = [it for it in columns if it.blocks]
    needed = grid.plan.threshold * grid.ceiling[name][0]
    worst = {it.length: float(it.values[:, candidate].mean(axis=0).min()) for it in measured}
    statuses = {it.length: grid.status(it, candidate) for it in measured}
    return Effective(
        length=_longest(columns, lambda it: statuses.get(it.length) == "above"),
        lost_at=next((it.length for it in measured if statuses[it.length] == "below"), None),
        estimate=_longest(columns, lambda it: worst.get(it.length, -1.0) >= needed),
    )


def ruler_mean(grid: Grid, candidate: int) -> int | None:
    """RULER's own: the longest length at which, and at all shorter ones, the mean over all tasks and positions is 85.6 % or
    more.

    Tasks that fail with the fact alone count with 0 there, as they do in RULER; a length counts where all others were measured.
    """
    means: list[float] = []
    for length in sorted(grid.plan.lengths):
        columns = [grid.columns[name, length] for name in grid.plan.tasks]
        if any(not it.blocks and it.missing is None and grid.usable(it.name) for it in columns):
            break
        scores = [it.values[:, candidate].mean() if it.blocks else 0.0 for it in columns if it.blocks or it.missing is None]
        if not scores:
            continue
        means.append(float(np.mean(scores)))
        if means[-1] < RULER:
            break
    passed = [length for length, mean in zip(sorted(grid.plan.lengths), means, strict=False) if mean >= RULER]
    return passed[-1] if passed else None


def _longest(columns: Sequence[Column], holds: Callable[[Column], bool]) -> int | None:
    longest = None
    for column in columns:
        if not holds(column):
            break
        longest = column.length
    return longest


def losses(grid: Grid, column: Column, candidate: int) -> dict[str, Any]:
    """Of a column, in 0 ... 1: what the format of the answer costs, what the length does at the best position, what the
    position does besides; and the mean, and the worst position."""
    by_position = column.values[:, candidate].mean(axis=0)
    ceiling, best, worst = grid.ceiling[column.name][0], float(by_position.max()), float(by_position.min())
    at = int(by_position.argmin())
    return {
        "answer_format": 1 - ceiling,
        "length": max(0.0, ceiling - best),
        "position": best - worst,
        "mean": float(by_position.mean()),
        "worst": worst,
        "worst_interval": [float(column.low[candidate, at]), float(column.high[candidate, at])],
        "worst_position": grid.plan.positions[at],
    }


def changes(grid: Grid) -> list[dict[str, Any]]:
    """What the second candidate changes in each cell that was measured, on the same questions.

    Units are paired: how many it answers better, how many worse. p is McNemar's at any time (`sequential_mcnemar`), of all
    units; p_holm after Holm's correction for all cells; p_mcnemar is the exact test of the first block alone, whose size no
    result chose."""
    found = []
    for column in grid.columns.values():
        for at, position in enumerate(grid.plan.positions if column.blocks else ()):
            difference = column.values[:, 1, at] - column.values[:, 0, at]
            first = difference[: len(difference) // column.blocks]
            found.append(
                {
                    "task": column.name,
                    "length": column.length,
                    "position": position,
                    "before": float(column.values[:, 0, at].mean()),
                    "after": float(column.values[:, 1, at].mean()),
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
    """What a reader should take from it."""
    usable = [name for name in grid.plan.tasks if grid.usable(name)]
    if not usable:
        best = max(mean for mean, _, _ in grid.ceiling.values())
        return (
            f"{model} answers none of these tasks even with the fact alone (at best {100 * best:.0f} %), so nothing is said of "
            "positions."
        )
    of_task = {name: effective(grid, name, candidate) for name in usable}
    shortest = f"{min(grid.plan.lengths):,}"
    lengths = sorted({it.length for it in of_task.values() if it.length}, reverse=True)
    found = [f"{length:,} tokens ({_named(of_task, lambda it, length=length: it.length == length)})" for length in lengths]
    lost = _named(of_task, lambda it: it.length is None and it.lost_at is not None)
    unsure = _named(of_task, lambda it: it.length is None and it.lost_at is None)
    clauses = []
    if found:
        clauses.append(f"{model} finds a fact wherever it stands in prompts of up to {', '.join(found)}")
    if lost and found:
        clauses.append(f"not even of {shortest} in {lost}")
    elif lost:
        clauses.append(f"{model} does not find a fact wherever it stands, not even in prompts of {shortest} tokens ({lost})")
    if unsure and clauses:
        clauses.append(f"of {unsure} not even {shortest} tokens were decided")
    elif unsure:
        clauses.append(
            f"Whether {model} finds a fact wherever it stands in prompts of {shortest} tokens was not decided ({unsure})"
        )
    return f"{'; '.join(clauses)}, with {100 * grid.plan.confidence:g} % confidence.{_first_loss(grid, of_task, candidate)}"


def _named(of_task: dict[str, Effective], holds: Callable[[Effective], bool]) -> str:
    return ", ".join(name for name, it in of_task.items() if holds(it))


def _first_loss(grid: Grid, of_task: dict[str, Effective], candidate: int) -> str:
    lost = {name: it.lost_at for name, it in of_task.items() if it.lost_at is not None}
    if not lost:
        return ""
    name = min(lost, key=lambda it: (lost[it], it))
    loss = losses(grid, grid.columns[name, lost[name]], candidate)
    return (
        f" The first to be lost is {name} at {lost[name]:,} tokens, where the fact stands at {loss['worst_position']} %: "
        f"{100 * loss['worst']:.0f} % right, and {100 * grid.ceiling[name][0]:.0f} % with the fact alone."
    )
