"""Checks of a comparison's settings that need no model and do not import JAX."""

from lpes_jax.checks import check_examples, check_file, check_model_name
from lpes_jax.choices import METHODS as NAMES
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds
from lpes_jax.settings.compare import CompareSettings
from lpes_jax.tasks.flags import task_of
from lpes_jax.tasks.prompts import check_once, check_positions

BASELINE = NAMES[0]


def check(settings: CompareSettings) -> tuple[str, ...]:
    """The requested methods. Raises UserError for flags that are invalid or contradict each other."""
    check_bounds(settings)
    check_positions(settings.questions.positions)
    check_once(settings.questions.metrics, "--metrics")
    named = settings.methods.methods
    if set(named) == {"all"}:
        return NAMES
    if "all" in named:
        raise UserError(f"--methods {' '.join(named)}: all already means every method; use it without others, or remove it")
    if unknown := [name for name in named if name not in NAMES]:
        raise UserError(f"--methods {unknown[0]!r} is not known; the methods are: all, {', '.join(NAMES)}")
    return tuple(dict.fromkeys((BASELINE, *named)))


def check_inputs(settings: CompareSettings) -> None:
    """Like `check`; also raises UserError for an invalid task, and for files that are missing or unusable."""
    check(settings)
    task = task_of(settings.task, max_new_tokens=settings.questions.max_new_tokens)
    if settings.task.task == "perplexity":
        raise UserError("--task perplexity has no positions to compare; use evaluate")
    check_examples([task], "search", settings.run.seed)
    if settings.factors.factors is not None:
        LayerFactors.load(settings.factors.factors)
    check_file("--router", settings.router.router, "train a router first")
    check_file("--text", settings.router.text, "any text file in UTF-8")
    check_model_name(settings.run.model)
