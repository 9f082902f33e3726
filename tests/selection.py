"""Parameters and random examples of which `make test` takes a few and `make test-all` all."""

from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Value = TypeVar("Value")
# Files that take more than ten seconds on a quiet machine, to be run first.
LONGEST = {
    *("test_devices.py", "test_golden_history.py", "test_survival.py", "test_profile.py", "test_mixture.py", "test_compare.py"),
    *("test_hosts.py", "test_cli.py", "test_zoo.py", "test_process.py", "test_scoring.py", "test_every_door.py"),
    *("test_gradient.py", "test_loop.py", "test_families.py", "test_model.py", "test_gains_search.py", "test_genetic.py"),
    *("test_prefixes.py", "test_task_runs.py", "test_gains.py", "test_help.py", "test_rope.py", "test_curves.py"),
}
FEW = False  # tests/conftest.py: whether long tests are left out


def drawn(most: int) -> int:
    """The number of Hypothesis' examples: `most`, or a third where long tests are left out."""
    return most // 3 if FEW else most


def mostly_long(values: Iterable[Value], *kept: Value, names: int = 1) -> list[Value | ParameterSet]:
    """All values, those that are not among `kept` marked `long`. With `names` above 1 a value is a tuple of so many arguments.

    Raises:
        ValueError: one of `kept` is no value.
    """
    values = list(values)
    if unknown := [value for value in kept if value not in values]:
        raise ValueError(f"no such parameters: {unknown}")
    arguments = [value if names > 1 else (value,) for value in values]
    return [
        value if value in kept else pytest.param(*parts, marks=pytest.mark.long)
        for value, parts in zip(values, arguments, strict=True)
    ]
