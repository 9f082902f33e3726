"""Checks of files and model names that do not open a model or import JAX."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.models.zoo import check_name
from lpes_jax.tasks.prompts import Split


def check_model_name(model: str) -> None:
    """Raise UserError if `--model` is not a name, file or folder, as far as is known without a download."""
    check_name(model)


def check_file(flag: str, path: Path | None, what: str) -> None:
    """Raise UserError if the path is not a file; None is allowed. `what` describes the file in the message."""
    if path is not None and not path.is_file():
        raise UserError(f"{flag} {path}: {'a folder, not a file' if path.is_dir() else 'no such file'}; {what}")


def check_examples(tasks: Iterable[Any], split: Split, seed: int) -> None:
    """Make each task check its settings and files. Raises UserError.

    Tasks without a file generate one example; the others check that their file exists. Files are read later, once.
    """
    for task in tasks:
        data = getattr(getattr(task, "longest", task), "data", None)
        if data is None or not Path(data).exists():
            task.examples(split, 1, seed)
