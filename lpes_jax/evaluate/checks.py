"""Checks of an evaluation's settings that need no model and do not import JAX."""

from lpes_jax.checks import check_examples, check_model_name
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.settings.evaluate import EvaluateSettings
from lpes_jax.settings.groups import check_chat
from lpes_jax.tasks.flags import task_of
from lpes_jax.tasks.prompts import check_once, check_positions, checked_stop


def check(settings: EvaluateSettings) -> None:
    """Raise UserError for flags that are invalid or contradict each other."""
    check_bounds(settings)
    if not settings.questions.slots:
        check_positions(settings.questions.positions)
    for name in ("slots", "lengths", "metrics"):
        check_once(getattr(settings.questions, name), f"--{name}")
    if settings.factors.only_factors and settings.factors.factors is None:
        raise UserError("--only-factors needs --factors")
    if settings.questions.lengths and settings.task.task != "needle":
        raise UserError("--lengths is for --task needle; other tasks have items to count (--num-pairs, --num-documents)")
    checked_stop(settings.questions.stop)
    check_chat(**settings.prompt.flat())


def check_inputs(settings: EvaluateSettings) -> None:
    """Like `check`; also raises UserError for an invalid task, and for files that are missing or unusable."""
    check(settings)
    task, questions = task_of(settings.task, max_new_tokens=settings.questions.max_new_tokens), settings.questions
    if settings.factors.factors is not None:
        LayerFactors.load(settings.factors.factors)
    if settings.task.task != "perplexity" and not questions.lengths:
        check_examples([task], questions.split, settings.run.seed)
    check_model_name(settings.run.model)
