"""Shared by the tests of tasks: files of rows, and the real files if they are present."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("LPES_JAX_DATA", Path(__file__).resolve().parents[2] / ".." / "shared" / "data"))


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (dicts, or lines as they are) as a .jsonl."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def real() -> Callable[[str], Path]:
    """A file of the evaluation data, which is no part of the project: skips where it is absent."""

    def find(name: str) -> Path:
        if not (DATA / name).exists():
            pytest.skip(f"no {name} (LPES_JAX_DATA names the folder of evaluation data)")
        return DATA / name

    return find
