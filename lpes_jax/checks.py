"""Files that are not there, refused before a model is opened and before JAX is imported."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.models.zoo import check_name
from lpes_jax.tasks.prompts import Split


def check_model_name(model: str) -> None:
    """Raise UserError for a `--model` that is no name, file or folder, as far as that is known without a download."""
    check_name(model)


def check_file(flag: str, path: Path | None, what: str) -> None:
    """Raise UserError for a path that is no file; None passes. `what`: what it should be, for the message."""
    if path is not None and not path.is_file():
        raise UserError(f"{flag} {path}: no such file; {what}")


def check_examples(tasks: Iterable[Any], split: Split, seed: int) -> None:
    """Have each task say what is wrong with it before any of its data is read.

    Tasks without a file draw one example, the others look for theirs. Files that are there are read later, once.
    """
    for task in tasks:
        data = getattr(getattr(task, "longest", task), "data", None)
        if data is None or not Path(data).exists():
            task.examples(split, 1, seed)
