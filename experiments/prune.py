"""How few numbers are enough? Gains (or factors) of which most are pruned to 1, at several strengths.

    python experiments/prune.py --model smollm2-135m-instruct --preset best --num-pairs 10 --niah-lines 40 --text FILE

`--prune` (`lpes_jax.search`) draws numbers to 1 in the first half of the steps; those that stay 1 are fixed, and the others are
trained further. Each strength and seed is a search on key-value pairs, and another on RULER's niah multikey_2 (`--tasks`), both
by gradient descent on all frequencies of the layers. Strength 0 prunes nothing.

The first table has accuracy against the count of numbers that differ from 1. The second has the overlap of these numbers
between seeds, and between the two tasks. The overlap of two sets is the count of their intersection divided by that of their
union; beside it stands that of two sets of these sizes whose intersection is as large as that of random ones on average.
Strengths that leave all numbers or none have no line there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from grid import GridFlags, figures, markdown_table, run_grid, run_script, scores, show_p, write_tables
from jaxtyping import Bool
from table_spec import provenance

from lpes_jax.evaluation import BASELINE
from lpes_jax.search import SearchSettings
from lpes_jax.statistics import paired_permutation_test

Mask = Bool[np.ndarray, "..."]
TASKS: tuple[Literal["kv", "niah"], ...] = ("kv", "niah")
TITLES = {"kv": "key-value pairs", "niah": "niah multikey_2"}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """The model, the two tasks and the strengths."""

    output_path: Path = Path("runs/prune")
    preset: Literal["paper", "default", "quick", "best"] = "best"
    task: tyro.conf.Suppress[Literal["kv", "mdqa"]] = "kv"
    num_pairs: int | None = 10
    niah_lines: int = 40
    """niah: lines of the haystack."""
    tasks: tuple[Literal["kv", "niah"], ...] = TASKS
    """The tasks of the searches."""
    learn: Literal["gains", "factors"] = "gains"
    """What is learnt and pruned."""
    metrics: tuple[str, ...] = ("prefix",)
    """Metrics of the held-out figures."""
    strengths: tuple[float, ...] = (0.0, 0.03, 0.1, 0.3, 1.0)
    """--prune of the searches: shares of the learning rate. The first is what the others are compared with."""
    text: Path | None = None
    """Plain text that must not become less likely (default: none)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each seed is a run of every strength, with its own search and held-out examples."""


def main(s: Settings) -> None:
    """Run the missing searches and write the tables."""
    cells = {name_of(task, strength, seed): cell(s, task, strength, seed) for task, strength, seed in all_cells(s)}
    records = run_grid(cells, s)
    kept = {name: differs(record["factors"][s.learn]) for name, record in records.items()}
    summary: dict[str, Any] = {
        "accuracy": {task: [accuracy(s, records, kept, task, strength) for strength in s.strengths] for task in s.tasks},
        "overlaps": overlaps(s, kept),
        "numbers": next(iter(kept.values())).size,
    } | provenance(list(records.values()))
    questions = next(iter(cells.values())).questions
    about = (
        f"{Path(s.model).name}, --learn {s.learn}: {summary['numbers']} numbers. Tasks: {s.num_pairs} key-value pairs, and "
        f"RULER's niah multikey_2 with {s.niah_lines} lines. {questions.limit} search examples, {questions.test_limit} "
        "held-out questions at each position. Accuracy in percent ± the sample standard deviation over seeds "
        f"{' '.join(map(str, s.seeds))}. p: paired permutation over the questions of all seeds, against strength "
        f"{s.strengths[0]:g}.\n"
    )
    write_tables(s, "How few numbers are enough?", [about, *tables(summary)], summary)


def all_cells(s: Settings) -> list[tuple[str, float, int]]:
    """Task, strength and seed of each search."""
    return [(task, strength, seed) for task in s.tasks for strength in s.strengths for seed in s.seeds]


def name_of(task: str, strength: float, seed: int) -> str:
    """The folder of a search."""
    return f"{task}_{strength:g}_seed{seed}"


def cell(s: Settings, task: str, strength: float, seed: int) -> SearchSettings:
    """The settings of one search."""
    only_kv, only_niah = ("num_pairs", "key_length"), {"task": "niah", "subset": "multikey_2", "num_lines": s.niah_lines}
    questions: dict[str, Any] = {"task": "kv"} if task == "kv" else only_niah | dict.fromkeys(only_kv)
    text: dict[str, Any] = {"text": s.text} if s.text else {"text_weight": 0.0, "max_text_loss_rise": None}
    return s.search(learn=s.learn, prune=strength, seed=seed, uniform_candidates=1, **text, **questions)


def differs(numbers: Any) -> Mask:
    """Which numbers of a factors.json differ from 1; null is a factor without rotation."""
    return np.array(numbers, dtype=float) != 1


def accuracy(s: Settings, records: Mapping[str, Any], kept: Mapping[str, Mask], task: str, strength: float) -> dict[str, Any]:
    """A strength's counts and accuracies by seed, with the paired test against the first strength."""
    names = [name_of(task, strength, seed) for seed in s.seeds]
    first = [name_of(task, s.strengths[0], seed) for seed in s.seeds]
    ours, others = (np.concatenate([scores(records[name]) for name in group]) for group in (names, first))
    return {
        "strength": strength,
        "counts": [int(kept[name].sum()) for name in names],
        "baseline": [figures(records[name], BASELINE)["acc,none"] for name in names],
        "accuracy": [figures(records[name])["acc,none"] for name in names],
        "p": None if strength == s.strengths[0] else paired_permutation_test(ours, others),
    }


def overlaps(s: Settings, kept: Mapping[str, Mask]) -> list[dict[str, Any]]:
    """The mean overlap of each strength: between the seeds of a task, and between the tasks of a seed."""
    found = []
    for strength in s.strengths:
        sets = {task: [kept[name_of(task, strength, seed)] for seed in s.seeds] for task in s.tasks}
        pairs = {f"seeds, {TITLES[task]}": list(combinations(masks, 2)) for task, masks in sets.items()}
        if len(sets) > 1:
            pairs["tasks, equal seeds"] = list(zip(*sets.values(), strict=True))
        for what, masks in pairs.items():
            values = [overlap(*pair) for pair in masks]
            if values and mean(values, 1) < 1:
                found.append({"strength": strength, "between": what, "overlap": mean(values, 0), "by_chance": mean(values, 1)})
    return found


def overlap(first: Mask, second: Mask) -> tuple[float, float]:
    """Intersection over union of two sets of numbers, and that of the mean intersection of random sets of equal sizes."""
    common, random = float((first & second).sum()), float(first.sum() * second.sum() / first.size)
    both = float(first.sum() + second.sum())
    return (common / (both - common), random / (both - random)) if both else (1.0, 1.0)


def mean(values: Sequence[Sequence[float]], column: int) -> float:
    """The mean of a column."""
    return float(np.mean([value[column] for value in values]))


def tables(summary: Mapping[str, Any]) -> list[str]:
    """The tables in Markdown; without overlaps only the first."""
    total, rows = summary["numbers"], []
    for task, entries in summary["accuracy"].items():
        for entry in entries:
            counts, found, plain = (np.array(entry[key], float) for key in ("counts", "accuracy", "baseline"))
            spread = f" ± {100 * found.std(ddof=1):.1f}" if len(found) > 1 else ""
            p, share = "-" if entry["p"] is None else show_p(entry["p"]), f"{100 * counts.mean() / total:.1f}"
            rows.append([TITLES[task], f"{entry['strength']:g}", " / ".join(map(str, entry["counts"])), share])
            rows[-1] += [f"{100 * plain.mean():.1f}", f"{100 * found.mean():.1f}{spread}", p]
    first = markdown_table(["task", "--prune", "differ from 1", "share, %", "as it is", "accuracy ±", "p"], rows)
    overlapping = [
        [f"{entry['strength']:g}", entry["between"], f"{entry['overlap']:.2f}", f"{entry['by_chance']:.2f}"]
        for entry in summary["overlaps"]
    ]
    return [first, *([markdown_table(["--prune", "between", "overlap", "by chance"], overlapping)] if overlapping else [])]


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
