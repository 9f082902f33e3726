"""The tasks by name. A task makes prompts whose fact can be moved: `lpes_jax.tasks.prompts.Task`."""

from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import Task

TASKS = ("kv",)


def make_task(name: str, **settings: Any) -> Task[Any]:
    """The task `name` with its own settings (`kv`: those of `KeyValue`). Raises UserError for a name that is none."""
    if name == "kv":
        return KeyValue(**settings)
    raise UserError(f"--task {name!r} is not known; the tasks are: {', '.join(TASKS)}")
