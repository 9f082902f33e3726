"""Checks of a comparison's settings that need no model and do not import JAX."""

from lpes_jax.checks import check_examples, check_file, check_model_name
from lpes_jax.choices import METHODS as NAMES
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.search.mixture import Part, other_parts
from lpes_jax.settings.compare import CompareSettings
from lpes_jax.tasks.flags import task_of
from lpes_jax.tasks.prompts import Task, check_once, check_positions

BASELINE = NAMES[0]


def check(settings: CompareSettings) -> tuple[str, ...]:
    """The requested methods. Raises UserError for flags that are invalid or contradict each other."""
    check_bounds(settings)
    check_positions(settings.questions.positions)
    check_once(settings.questions.metrics, "--metrics")
    if settings.task.data_folder is not None and settings.methods.other_tasks is None:
        raise UserError("--data-folder is the folder of relative paths in --other-tasks; use --data for the file of --task")
    named = settings.methods.methods
    if not named:
        raise UserError(f"--methods: give all, or at least one method; the methods are: {', '.join(NAMES)}")
    if set(named) == {"all"}:
        return NAMES
    if "all" in named:
        raise UserError(f"--methods {' '.join(named)}: all already means every method; use it without others, or remove it")
    if unknown := [name for name in named if name not in NAMES]:
        raise UserError(f"--methods {unknown[0]!r} is not known; the methods are: all, {', '.join(NAMES)}")
    return tuple(dict.fromkeys((BASELINE, *named)))


def tasks_asked(settings: CompareSettings) -> tuple[Task, str, tuple[Part, ...]]:
    """The tuned task, its title beside other tasks (empty if there are none), and the other tasks.

    Raises UserError for invalid tasks, and for tasks without positions.
    """
    questions, path = settings.questions, settings.methods.other_tasks
    task = task_of(settings.task, max_new_tokens=questions.max_new_tokens)
    if settings.task.task == "perplexity":
        raise UserError("--task perplexity has no positions to compare; use evaluate")
    if path is None:
        return task, "", ()
    tuned, others = other_parts(
        path, settings.task, task, questions.limit, questions.test_limit, max_new_tokens=questions.max_new_tokens
    )
    return task, tuned.title, others


def check_inputs(settings: CompareSettings) -> None:
    """Like `check`; also raises UserError for an invalid task, and for files that are missing or unusable."""
    check(settings)
    task, _, others = tasks_asked(settings)
    check_examples([task], "search", settings.run.seed)
    for other in others:
        with other.naming_errors():
            check_examples([other.task], "test", settings.run.seed)
    if settings.factors.factors is not None:
        LayerFactors.load(settings.factors.factors)
    check_file("--router", settings.router.router, "train a router first")
    check_file("--text", settings.router.text, "give a text file in UTF-8")
    check_model_name(settings.run.model)
