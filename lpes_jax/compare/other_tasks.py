"""`--other-tasks`: every method, as it was tuned on `--task`, on tasks on which nothing was tuned.

Outcomes are kept in the run's parts, as METHOD-NUMBER with the task's number in the file, from 1. A method that cannot be
measured on a task's prompts is refused there, with a reason, and stays in the comparison of the other tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, Outcome, default_metrics, evaluate, slots_of
from lpes_jax.models.llama import Loaded
from lpes_jax.report.tables import across_tasks, differences, markdown, markdown_table
from lpes_jax.results import figures_of, outcome_of, record_of, rows
from lpes_jax.search.mixture import Part
from lpes_jax.settings.compare import CompareSettings
from lpes_jax.store.parts import Parts
from lpes_jax.tasks.prompts import prompts_sha256


@dataclass(frozen=True)
class OtherTask:
    """A task on which nothing is tuned.

    Attributes:
        number: Its number in the file, from 1.
        part: The task, and its title.
        examples: Its held-out questions.
        slots: Where its facts are, as (slot, position).
    """

    number: int
    part: Part
    examples: Sequence[Any]
    slots: Sequence[tuple[int, int]]

    def record(self) -> dict[str, Any]:
        """Everything that determines its questions."""
        own = {name: value for name, value in self.part.record().items() if name not in ("limit", "weight")}
        return {"title": self.part.title, **own}

    def key(self, method: str) -> str:
        """The name of a method's record in the run's parts."""
        return f"{method}-{self.number}"


@dataclass(frozen=True)
class Measured:
    """A task, the outcomes of the methods that were measured on it, and why the others were not."""

    task: OtherTask
    outcomes: Sequence[Outcome]
    refused: Mapping[str, str]

    @property
    def title(self) -> str:
        """The task's title."""
        return self.task.part.title

    @cached_property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The figures of each method that was measured."""
        return figures_of(self.outcomes, self.task.slots)

    def record(self) -> dict[str, Any]:
        """The entry of `other_tasks` in `results.json`."""
        return {
            "title": self.title,
            "task": self.task.part.task.name,
            "settings": self.task.record(),
            "questions": len(self.outcomes[0].main),
            "methods": self.methods,
            "refused": dict(self.refused),
            "prompts_sha256": prompts_sha256(self.outcomes[0].prompts),
        }


def with_questions(parts: Sequence[Part], settings: CompareSettings) -> list[OtherTask]:
    """The tasks with their held-out questions. Raises UserError if a file is unusable or has too few."""
    found = []
    for number, part in enumerate(parts, 1):
        with part.naming_errors():
            examples = part.task.examples("test", part.test_limit, settings.run.seed)
            slots = slots_of(part.task, settings.questions.positions if part.task.num_items > 1 else (0,))
        found.append(OtherTask(number, part, examples, slots))
    return found


def measure(
    task: OtherTask,
    candidates: Sequence[Candidate],
    settings: CompareSettings,
    loaded: Loaded,
    kept: Parts,
    on_prompts: Callable[[int], None] = lambda count: None,
) -> Measured:
    """Measure the candidates on a task, except those that `kept` has.

    Raises:
        UserError: The task cannot be measured at all: prompts are too long, or the unchanged model is refused.
    """
    questions, part = settings.questions, task.part
    known = ("prefix", *part.task.metrics) if part.task.decided_by == "generation" else part.task.metrics
    metrics = tuple(metric for metric in questions.metrics if metric in known) or default_metrics(part.task)[:1]

    def refuse(candidate: Candidate, reason: UserError) -> None:
        if candidate.name == BASELINE:
            raise reason
        kept.keep("refused", task.key(candidate.name), {"reason": str(reason)})

    def kept_by_name(kind: str) -> dict[str, dict[str, Any]]:
        names = {candidate.name: task.key(candidate.name) for candidate in candidates}
        return {name: kept.records[kind][key] for name, key in names.items() if key in kept.records[kind]}

    refused = kept_by_name("refused")
    with part.naming_errors():
        outcomes = evaluate(
            loaded.model,
            loaded.tokenizer,
            part.task,
            task.examples,
            task.slots,
            [candidate for candidate in candidates if candidate.name not in refused],
            Conditions.of(questions, metrics, loaded.stop_ids, settings.devices.batch_size),
            on_prompts=on_prompts,
            earlier={name: outcome_of(record) for name, record in kept_by_name("other").items()},
            on_outcome=lambda outcome: kept.keep("other", task.key(outcome.candidate.name), record_of(outcome)),
            on_refused=refuse,
        )
    return Measured(task, outcomes, {name: record["reason"] for name, record in kept_by_name("refused").items()})


def forget(tasks: Sequence[OtherTask], method: str, kept: Parts) -> None:
    """Remove what was kept of a method."""
    for task in tasks:
        kept.forget("other", task.key(method))
        kept.forget("refused", task.key(method))


def table(title: str, methods: Mapping[str, Any], measured: Sequence[Measured]) -> list[list[str]]:
    """The table of all tasks, in lines of cells: the tuned task's `title` and its methods' figures, then the others."""
    figures = {f"{title} (tuned)": methods}
    return across_tasks(figures | {one.title: one.methods for one in measured})


def notes(measured: Sequence[Measured]) -> list[str]:
    """Lines below the table."""
    note = (
        "Nothing was tuned on the tasks after the first. A cell has accuracy ± standard error and, in brackets, the difference "
        "from the baseline in points and its p after Holm's correction for all methods of that task."
    )
    refused = [f"{name}: refused on {one.title}. {reason}" for one in measured for name, reason in one.refused.items()]
    return [note, *refused]


def sections(title: str, methods: Mapping[str, Any], measured: Sequence[Measured]) -> str:
    """The part of `results.md` about other tasks: the table of all tasks, then each task by position."""
    header, *body = table(title, methods, measured)
    found = [markdown_table([header, ["---", *["---:"] * (len(header) - 1)], *body]), *notes(measured)]
    for one in measured:
        positions = [position for _, position in one.task.slots]
        found += [
            f"{one.title}, {len(one.outcomes[0].main)} held-out questions, nothing tuned on them",
            markdown(rows(one.outcomes), positions),
            differences(one.methods),
        ]
    return "\n\n".join(text for text in found if text)
