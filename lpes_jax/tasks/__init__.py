"""The tasks by name.

A task makes prompts with gold answers and positions, and scores the model's outputs: `lpes_jax.tasks.prompts.Task`. The
exception is `perplexity`, which has windows of tokens: `lpes_jax.tasks.perplexity.Perplexity`.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.tasks.common_words import CommonWords
from lpes_jax.tasks.frequent_words import FrequentWords
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.l_eval import LEval
from lpes_jax.tasks.many_shot import ManyShot
from lpes_jax.tasks.mdqa import MultiDocumentQA
from lpes_jax.tasks.multiple_choice import MultipleChoice
from lpes_jax.tasks.needle import Needle
from lpes_jax.tasks.niah import Niah
from lpes_jax.tasks.perplexity import Perplexity
from lpes_jax.tasks.variable_tracking import VariableTracking
from lpes_jax.tasks.zero_scrolls import ZeroScrolls

CLASSES: dict[str, Any] = {
    "kv": KeyValue,
    "mdqa": MultiDocumentQA,
    "needle": Needle,
    "niah": Niah,
    "vt": VariableTracking,
    "cwe": CommonWords,
    "fwe": FrequentWords,
    "many_shot": ManyShot,
    "zero_scrolls": ZeroScrolls,
    "l_eval": LEval,
    "mmlu": MultipleChoice,
    "ceval": MultipleChoice,
    "perplexity": Perplexity,
}
TASKS = tuple(CLASSES)


def settings_of(name: str) -> tuple[str, ...]:
    """The names of a task's settings. Raises UserError for an unknown task."""
    if name not in CLASSES:
        raise UserError(f"--task {name!r} is not known; the tasks are: {', '.join(TASKS)}")
    return tuple(field.name for field in fields(CLASSES[name]) if field.name != "benchmark")


def make_task(name: str, **settings: Any) -> Any:
    """Make a task with its own settings.

    Args:
        name: One of `TASKS`.
        settings: Fields of the task's class, which documents them.

    Returns:
        A `Task`, or a `Perplexity`.

    Raises:
        UserError: The task or a setting is unknown, or the class refuses a value.
    """
    known = settings_of(name)
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        flags = ", ".join(_flag(setting) for setting in known)
        raise UserError(f"{_flag(unknown[0])} is not a setting of --task {name}, which has: {flags}")
    for count in ("max_prompt_tokens", "max_new_tokens"):
        if (value := settings.get(count)) is not None and value < 1:
            raise UserError(f"{_flag(count)} must be at least 1, got {value}")
    if name == "kv" and "num_pairs" not in settings:
        raise UserError("--task kv needs --num-pairs")
    if isinstance(settings.get("data"), str):
        settings["data"] = Path(settings["data"])
    if name in ("mmlu", "ceval"):
        settings["benchmark"] = name
    return CLASSES[name](**settings)


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
