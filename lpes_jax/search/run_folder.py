"""The folder of a run: `config.json` first, then `history.jsonl` line by line, then the results.

The history is the state. A search is a function of its settings and of the scores it has seen, so a run that was cut off is
resumed by running it again from the start with the scores of the history in place of the model's: it makes the same
candidates, and goes on where the lines end. A line cut in two by a kill is dropped. A gradient search scores nothing that could
be replayed: it leaves `state.npz` with each line, and goes on from there.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.factors import read_json, write_json


class RunFolder:
    """A run's files. Raises UserError where the folder holds another run."""

    def __init__(self, path: Path, config: dict[str, Any], resume: bool):
        """`config` is what decides the run's results; a resumed run must have the same."""
        self.path = path
        self.history_path, self.state_path = path / "history.jsonl", path / "state.npz"
        self.recorded: list[dict[str, Any]] = []
        if resume:
            self._check(read_json(path / "config.json"), json.loads(json.dumps(config)))
            self._keep_whole_lines()
            self.recorded = [json.loads(line) for line in self.history_path.read_text(encoding="utf-8").splitlines()]
        elif self.history_path.exists():
            raise UserError(f"--output-path {path} holds a run already; give --resume to go on with it, or another folder")
        else:
            try:
                path.mkdir(parents=True, exist_ok=True)
                write_json(path / "config.json", config)
                self.history_path.touch()
            except OSError as error:
                raise UserError(f"--output-path {path}: cannot be written ({error.strerror})") from error

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add lines to the history; they are on the disk when this returns."""
        with self.history_path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))

    def keep(self, count: int) -> list[dict[str, Any]]:
        """Drop all lines of the history but the first `count`, and return these."""
        self.recorded = self.recorded[:count]
        lines = self.history_path.read_bytes().splitlines(keepends=True)[:count]
        with self.history_path.open("r+b") as file:
            file.truncate(sum(map(len, lines)))
        return list(self.recorded)

    def save_state(self, state: Any) -> None:
        """Keep the numbers of a pytree beside the history, whole or not at all."""
        temporary = self.state_path.with_name("part.npz")
        np.savez(temporary, *[np.asarray(leaf) for leaf in jax.tree.leaves(state)])
        os.replace(temporary, self.state_path)

    def load_state(self, like: Any) -> Any:
        """What `save_state` kept, in the structure and types of `like`; None where a run is new."""
        if not (self.recorded and self.state_path.exists()):
            return None
        leaves, structure = jax.tree.flatten(like)
        with np.load(self.state_path, allow_pickle=False) as saved:
            kept = [saved[name] for name in saved.files]
        types = [type(leaf) if isinstance(leaf, bool | int | float) else jnp.asarray for leaf in leaves]
        return jax.tree.unflatten(structure, [kind(value) for kind, value in zip(types, kept, strict=True)])

    def must_continue(self, draft: dict[str, Any], record: dict[str, Any]) -> None:
        """Refuse a line of the history that is not the individual which this search makes in its place."""
        if any(draft[name] != record.get(name) for name in draft):
            raise UserError(
                f"--resume: individual {draft['id']} of {self.history_path} is not the one that this search makes "
                "(another version of the program or of JAX?); give another --output-path"
            )

    def _check(self, recorded: dict[str, Any], config: dict[str, Any]) -> None:
        different = [key for key in config.keys() | recorded.keys() if config.get(key) != recorded.get(key)]
        if different:
            key = sorted(different)[0]
            raise UserError(
                f"--resume: {self.path} was run with {key}={recorded.get(key)!r}, not {config.get(key)!r}; "
                "give the same settings or another --output-path"
            )

    def _keep_whole_lines(self) -> None:
        self.history_path.touch()
        written = self.history_path.read_bytes()
        whole = written.rfind(b"\n") + 1
        if whole < len(written):
            with self.history_path.open("r+b") as file:
                file.truncate(whole)
