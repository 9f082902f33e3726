"""What a comparison has tuned and measured so far: OUT/unfinished, until its results are written.

`begun.json` says what decides the results. Beside it lie `METHOD.tuned.json` and `METHOD.measured.json`, each written when the
method is done. Without `begun.json` nothing can be told of the others, and they are not taken.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.evaluation import Candidate, Outcome
from lpes_jax.factors import read_json, write_json
from lpes_jax.provenance import check_resumed

_PLAIN = ("compilations", "prompt_tokens", "counts", "outputs", "output_tokens")  # of an Outcome: JSON as they are


class Unfinished:
    """`tuned` and `measured`: records by the method's name, those on the disk at first.

    Raises UserError for a folder with such files, unless it is to be resumed and `config` is as it was (`check_resumed`).
    """

    def __init__(self, folder: Path, config: dict[str, Any], resume: bool, overwrite: bool = False):
        self.path, self._config = folder / "unfinished", json.loads(json.dumps(config))
        self._begun = self.path / "begun.json"
        if overwrite and self.path.exists():
            self.drop()
        if resume and not self.path.exists():
            raise UserError(f"--resume: {folder} holds no comparison that was cut off; leave --resume out to begin one")
        if self.path.exists() and not resume:
            raise UserError(
                f"--output-path {folder} holds a comparison that was cut off; give --resume to go on with it, another folder, "
                f"or delete {self.path}"
            )
        if self._begun.exists():
            check_resumed(folder, read_json(self._begun), self._config)
        elif self.path.exists():
            shutil.rmtree(self.path)
        self.tuned, self.measured = self._read("tuned"), self._read("measured")

    def _read(self, what: str) -> dict[str, Any]:
        return {path.name.partition(".")[0]: read_json(path) for path in self.path.glob(f"*.{what}.json")}

    def keep(self, what: Literal["tuned", "measured"], name: str, record: dict[str, Any]) -> None:
        """Of a method, on the disk and in mind."""
        if not self._begun.exists():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--output-path {self.path.parent}: cannot be written ({error.strerror})") from error
            write_json(self._begun, self._config)
        write_json(self.path / f"{name}.{what}.json", record)
        getattr(self, what)[name] = record

    def forget(self, name: str) -> None:
        """What was measured of a method, if it was."""
        (self.path / f"{name}.measured.json").unlink(missing_ok=True)
        self.measured.pop(name, None)

    def drop(self) -> None:
        """Remove the files, `begun.json` first: the results are written."""
        self._begun.unlink(missing_ok=True)
        shutil.rmtree(self.path)

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """A SIGINT or SIGTERM in here says how to go on."""

        def way_on() -> str:
            if not self._begun.exists():
                return "interrupted, and nothing was measured yet"
            return f"interrupted; what was measured is in {self.path}: the same command with --resume goes on from there"

        return process.saying(way_on)


def record_of(outcome: Outcome) -> dict[str, Any]:
    """All of an outcome but its candidate and its prompts, as JSON has it."""
    likelihood, begun = outcome.log_likelihood, outcome.prefix_of_outputs
    return {
        "scores": {metric: values.tolist() for metric, values in outcome.scores.items()},
        "log_likelihood": None if likelihood is None else [[str(value) for value in row] for row in likelihood],  # may be -inf
        "prefix_of_outputs": None if begun is None else begun.tolist(),
        **{name: getattr(outcome, name) for name in _PLAIN},
    }


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The outcome of a record; `evaluate` gives it its candidate and prompts."""
    likelihood, begun = record["log_likelihood"], record["prefix_of_outputs"]
    return Outcome(
        Candidate(""),
        [],
        {metric: np.array(values) for metric, values in record["scores"].items()},
        None if likelihood is None else np.array(likelihood, np.float32),
        prefix_of_outputs=None if begun is None else np.array(begun),
        **{name: record[name] for name in _PLAIN},
    )
