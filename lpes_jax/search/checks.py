"""Checks of a search's settings that need no model and do not import JAX."""

import difflib
import math
from collections.abc import Sequence

from lpes_jax.checks import check_examples, check_file, check_model_name
from lpes_jax.choices import ALGORITHMS
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.limits import check_bounds, check_individuals
from lpes_jax.search.mixture import Mixture, mixture_of
from lpes_jax.settings.groups import check_chat
from lpes_jax.settings.search import SearchSettings
from lpes_jax.tasks.flags import name_of, tasks_of
from lpes_jax.tasks.prompts import Task, check_once, check_positions


def check(settings: SearchSettings) -> None:
    """Raise UserError for flags that are invalid or contradict each other."""
    check_bounds(settings)
    ga, gradient, space, fitness = settings.ga, settings.gradient, settings.space, settings.objective.fitness
    if settings.algorithm != "gradient" and ga.max_evaluations is None:
        check_individuals(ga.population_size + ga.generations * (ga.mutations + 2 * ga.crossovers))
    check_positions(settings.questions.positions)
    check_once(settings.questions.metrics, "--metrics")
    check_chat(**settings.prompt.flat())
    check_weights(settings.objective.weights, settings.objective.search_positions)
    for name, value in settings.flat().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
    if gradient.stay_close < 0:
        raise UserError(f"--stay-close must be at least 0, got {gradient.stay_close}")
    if settings.algorithm not in ALGORITHMS:
        close = difflib.get_close_matches(settings.algorithm, ALGORITHMS) or ["ga", "gradient", "cma_es"]
        raise UserError(f"--algorithm {settings.algorithm!r} is not known; did you mean {', '.join(close)}?")
    if ga.race and settings.algorithm == "gradient":
        raise UserError("--race drops individuals, and --algorithm gradient has none; remove --race")
    if settings.devices.score_dtype is not None and settings.algorithm == "gradient":
        raise UserError(
            f"--score-dtype {settings.devices.score_dtype} scores individuals, and --algorithm gradient has none; remove it"
        )
    if settings.task.is_mixture:
        several = "--mixture" if settings.task.mixture is not None else f"--task {' '.join(settings.task.task)}"
        if ga.race:
            raise UserError(f"{several}: --race compares questions of one task; remove it")
        if fitness == "metric":
            raise UserError(f"{several}: --fitness metric works with one task; use accuracy or log_likelihood")
    if ga.race and fitness == "metric":
        raise UserError("--race: --fitness metric makes individuals generate text one by one on all questions; remove --race")
    if space.parameter != "multiplier" and space.min_factor == 0:
        raise UserError("--min-factor must be above 0, got 0.0; --parameter multiplier takes 0")
    if space.parameter == "log" and settings.algorithm != "gradient":
        raise UserError(
            f"--parameter log needs --algorithm gradient; --algorithm {settings.algorithm} takes factor or multiplier"
        )
    if space.parameter == "log" and gradient.box == "sigmoid":
        raise UserError("--parameter log and --box sigmoid are two scales of the same number; give one of them")
    if gradient.prune:
        if not 0 < gradient.prune <= 1:
            raise UserError(f"--prune {gradient.prune} must be from 0 (off) to 1: it is a share of --learning-rate")
        if settings.algorithm != "gradient" or gradient.box == "sigmoid" or space.curve not in ("free", "shared"):
            raise UserError("--prune needs --algorithm gradient, --box clip and --curve free or shared")
        if gradient.steps < 2:
            raise UserError(
                f"--prune needs --steps of at least 2, half of which train the remaining factors; got {gradient.steps}"
            )
    text = settings.text
    if text.text is not None and settings.algorithm != "gradient":
        raise UserError(f"--text is for --algorithm gradient; --algorithm {settings.algorithm} does not read it; remove it")
    if text.text is not None and not text.text_weight and text.max_text_loss_rise is None:
        raise UserError("--text has no effect: give --text-weight above 0 or --max-text-loss-rise, or remove it")
    if ga.max_evaluations is not None and settings.algorithm == "gradient":
        raise UserError("--max-evaluations counts individuals, and --algorithm gradient has none; give --steps")


def check_weights(weights: Sequence[float], positions: Sequence[int]) -> None:
    """Raise UserError unless each of `--search-positions` has a weight, and the weights are shares of 1."""
    check_positions(positions, "--search-positions")
    shown = " ".join(map(str, weights))
    if len(weights) != len(positions):
        shown_positions = " ".join(map(str, positions))
        raise UserError(f"--weights {shown}: give one number for each of --search-positions {shown_positions}")
    if not (all(weight >= 0 for weight in weights) and abs(sum(weights) - 1) <= 1e-6):  # false for NaN, too
        raise UserError(f"--weights must be numbers from 0 that sum to 1, got {shown}")


def check_inputs(settings: SearchSettings) -> None:
    """Like `check`; also raises UserError for invalid tasks, and for files that are missing or unusable."""
    check(settings)
    mixture, tasks = tasks_asked(settings)
    if mixture is None:
        check_examples(tasks, "search", settings.run.seed)
    else:
        for part in mixture.parts:
            with part.naming_errors():
                check_examples([part.task], "search", settings.run.seed)
    if settings.start.initial_factors is not None:
        LayerFactors.load(settings.start.initial_factors)
    if settings.algorithm == "gradient":
        check_file("--text", settings.text.text, "give a text file in UTF-8")
    check_model_name(settings.run.model)


def tasks_asked(settings: SearchSettings) -> tuple[Mixture | None, list[Task]]:
    """The mixture (None for a single task), and its tasks; a single task is listed once per length.

    Raises UserError for invalid tasks, and for tasks that a search cannot use.
    """
    questions = settings.questions
    mixture = mixture_of(settings.task, questions.limit, questions.test_limit, max_new_tokens=questions.max_new_tokens)
    if mixture is not None:
        return mixture, mixture.tasks
    if name_of(settings.task) == "perplexity":
        raise UserError("--task perplexity has no questions to search on; search on another task and evaluate on this one")
    return None, tasks_of(settings.task, max_new_tokens=questions.max_new_tokens)
