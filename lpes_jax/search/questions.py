"""The questions of a search: search prompts and held-out questions of each task, read and checked before anything is scored."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.evaluation import default_metrics, slots_of
from lpes_jax.models.llama.model import Llama
from lpes_jax.search.mixture import Mixture
from lpes_jax.search.scorers import fitting_prompts, search_prompts
from lpes_jax.settings.search import SearchSettings
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.prompts import Prompt, Task

Slots = list[tuple[int, int]]


@dataclass(frozen=True)
class TaskQuestions:
    """The questions of one task (length).

    Attributes:
        task: The task.
        title: Its title in a mixture; "" otherwise.
        searched: The (slot, position) pairs of the search.
        reported: The (slot, position) pairs of the held-out report.
        prompts: The search prompts, question by question.
        held_out: The held-out questions.
        held_out_prompts: Their prompts, with and without the forced opener.
        metrics: The metrics of the held-out report.
    """

    task: Task
    title: str
    searched: Slots
    reported: Slots
    prompts: list[Prompt]
    held_out: Sequence[Any]
    held_out_prompts: list[Prompt]
    metrics: Sequence[str]


def read_questions(
    settings: SearchSettings, model: Llama, tokenizer: Any, tasks: Sequence[Task], mixture: Mixture | None
) -> tuple[list[TaskQuestions], dict[str, int]]:
    """The questions of each task, and the counts of leaky search questions (`count_leaky`).

    Args:
        settings: The settings of the search.
        model: The model.
        tokenizer: Its tokenizer.
        tasks: The tasks.
        mixture: The mixture that has these tasks; None for lengths of one task.

    Raises:
        UserError: The tasks need a Mixture, a metric is unknown, or prompts do not fit the model, the fitness or the algorithm.
    """
    metrics = _metrics(settings, tasks, mixture is not None)
    reported = [slots_of(task, settings.questions.positions if task.num_items > 1 else (0,)) for task in tasks]
    searched = [slots_of(task, settings.objective.search_positions if task.num_items > 1 else (0,)) for task in tasks]
    if mixture is None and len({(len(slots), task.decided_by) for slots, task in zip(searched, tasks, strict=True)}) > 1:
        raise UserError("tasks with and without positions, or with and without options, are searched on together in a Mixture")
    counts: Counter[str] = Counter()
    questions = []
    for index, task in enumerate(tasks):
        part = None if mixture is None else mixture.parts[index]
        limit, test_limit = settings.questions.limit, settings.questions.test_limit
        errors_name_the_task: AbstractContextManager[None] = contextlib.nullcontext()
        if part is not None:
            limit, test_limit, errors_name_the_task = part.limit, part.test_limit, part.naming_errors()
        with errors_name_the_task:
            examples = task.examples("search", limit, settings.run.seed)
            prompts = search_prompts(settings, model.config, task, tokenizer, examples, searched[index], counts)
            held_out = task.examples("test", test_limit, settings.run.seed)
            later = _held_out_prompts(settings, model, tokenizer, task, held_out, reported[index], metrics[index])
            if part is not None:  # for the errors; the scorer of all tasks encodes them again
                task_prompts.encode(prompts, tokenizer, model.config.max_position_embeddings)
        title, slots = "" if part is None else part.title, (searched[index], reported[index])
        questions.append(TaskQuestions(task, title, *slots, prompts, held_out, later, metrics[index]))
    return questions, dict(counts)


def _metrics(settings: SearchSettings, tasks: Sequence[Task], is_mixture: bool) -> list[Sequence[str]]:
    """The metrics of each task's held-out report.

    In a mixture a task has those of `--metrics` that it knows, or else its own: its first default metric, and F1 if it has it.
    Raises UserError for a metric that no task has.
    """
    if not is_mixture:
        return [settings.questions.metrics or default_metrics(tasks[0])[:1]] * len(tasks)
    known = [("prefix", *task.metrics) if task.decided_by == "generation" else task.metrics for task in tasks]
    if unknown := [metric for metric in settings.questions.metrics if not any(metric in own_metrics for own_metrics in known)]:
        raise UserError(
            f"--metrics {unknown[0]}: no task of the mixture has it; they have {', '.join(sorted({*sum(known, ())}))}"
        )
    reported = []
    for task, own_metrics in zip(tasks, known, strict=True):
        own = default_metrics(task)[:1]
        own += tuple(metric for metric in ("f1",) if metric in task.metrics and metric not in own)
        reported.append(tuple(metric for metric in settings.questions.metrics if metric in own_metrics) or own)
    return reported


def _held_out_prompts(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    slots: Slots,
    metrics: Sequence[str],
) -> list[Prompt]:
    """The prompts of held-out questions, checked like the search prompts, so that errors come before the search."""
    generates, fitted = task.decided_by == "generation" and any(metric != "prefix" for metric in metrics), []
    for version in (task, task.plain):
        if version is not None:
            version_prompts = [version.prompt(example, *slot) for example in examples for slot in slots]
            version_prompts, _ = count_leaky(version_prompts, settings.questions.drop_leaky)
            fitted += fitting_prompts(settings, model.config, version, tokenizer, version_prompts, generates)
    if generates:
        new_tokens = settings.questions.max_new_tokens or task.max_new_tokens
        encoded = task_prompts.encode(fitted, tokenizer, model.config.max_position_embeddings)
        if new_tokens < (longest := max((len(ids) for prompt in encoded for ids in prompt.answers), default=0)):
            raise UserError(f"--max-new-tokens {new_tokens} is below the longest gold answer, {longest} tokens")
    return fitted
