"""The folder of a run: `config.json`, then `history.jsonl` line by line, then the results, `results.json` last.

The history is the state. A search is a function of its settings and of the scores it has seen, so a run that was cut off is
resumed by running it again from the start with the scores of the history in place of the model's: it makes the same
candidates, and goes on where the lines end. A gradient search scores nothing that could be replayed: it leaves `state.npz`
with each line, and the state before it as `state.previous.npz`.

What a kill, a full disk or a power cut leaves is good to go on with: lines are on the disk (fsync) before the search goes on, a
line that was cut in two is dropped, and all other files are written under another name and renamed when they are on the disk.
While a run is open its history is locked (flock), which ends with the process, however that ends. Where the file system has no
such locks the user is told, and has to see to it that no two processes write to one folder.

Of several processes of one run (lpes_jax.hosts) the first has the folder; the others get from it what it has read, and add
nothing but the check that their lines are the same.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lpes_jax import hosts
from lpes_jax.errors import UserError
from lpes_jax.json_files import is_array, is_number, parse_json, read_json
from lpes_jax.store import files, output
from lpes_jax.store.provenance import check_resumed


class RunFolder:
    """A run's files, locked until `close`. Raises UserError where the folder holds another run, or a process works in it."""

    def __init__(self, path: Path, config: dict[str, Any], resume: bool, overwrite: bool = False):
        """`config` is what decides the run's results, and the `environment`; a resumed run must have the same but for this.

        Paths of files may differ: it has the hashes of their contents. `overwrite` drops the run that is there.
        """
        self.path = path
        self.history_path, self.state_path = path / "history.jsonl", path / "state.npz"
        self._history: Any = None
        self.recorded, self.resumed = hosts.from_first(lambda: self._open(config, resume, overwrite))

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock it. Nothing is left to write."""
        if self._history is not None:
            self._history.close()

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add lines to the history; they are on the disk when this returns.

        Raises UserError where another process has other lines, or the file cannot be written.
        """
        untimed = [{name: value for name, value in record.items() if name != "seconds"} for record in records]
        line = self.history_path.name + f" from individual {records[0]['id']} on, of checksum" if records else "no lines"
        hosts.check_alike({line: zlib.crc32(json.dumps(untimed).encode())}, "use hosts of one kind, with the same program")
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        if not hosts.is_first():
            return
        with self.writing():
            while lines:
                lines = lines[self._history.write(lines) :]
            os.fsync(self._history.fileno())

    def keep(self, count: int) -> list[dict[str, Any]]:
        """Drop all lines of the history but the first `count`, and return these."""
        self.recorded = self.recorded[:count]
        if not hosts.is_first():
            return list(self.recorded)
        lines = self.history_path.read_bytes().splitlines(keepends=True)[:count]
        with self.writing():
            os.truncate(self.history_path, sum(map(len, lines)))
            self._history.seek(0, os.SEEK_END)
        return list(self.recorded)

    def save_state(self, state: Any) -> None:
        """Keep the numbers of a pytree beside the history, whole or not at all, and the ones before."""
        if not hosts.is_first():
            return
        with self.writing():
            with files.replacing(self.state_path, previous=self._previous_path) as part, part.open("wb") as file:
                np.savez(file, *[np.asarray(leaf) for leaf in jax.tree.leaves(state)])
            files.sync(self.path)

    def states(self, like: Any) -> Iterator[Any]:
        """What `save_state` kept and can be read, newest first, in the structure and types of `like`."""
        leaves, structure = jax.tree.flatten(like)
        types = [type(leaf) if isinstance(leaf, bool | int | float) else jnp.asarray for leaf in leaves]
        for path in (self.state_path, self._previous_path):
            kept = hosts.from_first(lambda path=path: _arrays(path))
            try:
                state = [kind(value) for kind, value in zip(types, kept, strict=True)]
            except (ValueError, TypeError):  # not whole, or another search's
                continue
            yield jax.tree.unflatten(structure, state)

    def settle(self) -> None:
        """All files of the folder are on the disk when this returns."""
        for path in self.path.iterdir():
            files.sync(path)

    def must_continue(self, draft: dict[str, Any], record: dict[str, Any]) -> None:
        """Refuse a line of the history that is not the individual which this search makes in its place."""
        if any(draft[name] != record.get(name) for name in draft):
            raise UserError(
                f"--resume: individual {draft['id']} of {self.history_path} is not the one that this search makes "
                "(another version of the program or of JAX?); give another --output-path"
            )

    def writing(self) -> AbstractContextManager[None]:
        """Turn an OSError in here, a full disk say, into a UserError that says how to go on."""
        way_out = "make room, then go on with --resume" if self.history_path.exists() else "give another folder"
        return files.writing(f"--output-path {self.path}", way_out)

    def _open(self, config: dict[str, Any], resume: bool, overwrite: bool) -> tuple[list[dict[str, Any]], bool]:
        """The folder, locked: the records that it has, and whether a run goes on there."""
        path, self.recorded = self.path, []
        started = self.history_path.exists() or (path / "config.json").exists()
        if resume and not started and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"--resume: {path} holds no run (no config.json); leave --resume out to begin one")
        if not (resume or overwrite) and self.history_path.exists():
            raise UserError(f"--output-path {path} holds a run already; give --resume to go on with it, or another folder")
        with self.writing():
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._history = self.history_path.open("a+b" if resume or overwrite else "xb", buffering=0)
            except FileExistsError as error:
                if not path.is_dir():
                    raise UserError(f"--output-path {path}: a file is there, not a folder; give another folder") from error
                # Another process began a run in this moment.
                raise UserError(f"--output-path {path} holds a run already; give another folder") from error
        try:
            files.lock(self._history, path)
            if overwrite:
                with self.writing():
                    output.remove(path, output.SEARCHED)  # the history is emptied below
            kept = self._whole_lines() if resume else b""
            before = self._config_before(needed=bool(kept)) if resume else None
            if before is not None:
                check_resumed(self.path, before, json.loads(json.dumps(config)))
            with self.writing():
                os.truncate(self.history_path, len(kept))
                self._history.seek(0, os.SEEK_END)
                os.fsync(self._history.fileno())
                if before is None:
                    files.write_json(path / "config.json", config)
                    files.sync(path)
        except BaseException:
            self.close()
            raise
        return self.recorded, bool(kept)

    @property
    def _previous_path(self) -> Path:
        return self.path / "state.previous.npz"

    def _config_before(self, needed: bool) -> Any:
        """config.json; None where it is damaged and not needed: there are no lines that it stands for."""
        try:
            return read_json(self.path / "config.json", dict)
        except UserError:
            if needed:
                raise
            return None

    def _whole_lines(self) -> bytes:
        """The lines of the history up to the first that is damaged; their records are `recorded`."""
        kept = b""
        for line in self.history_path.read_bytes().splitlines(keepends=True):
            try:
                record = parse_json(line, str(self.history_path), dict)
            except UserError:
                break
            if not line.endswith(b"\n") or record.get("id") != len(self.recorded):
                break
            if wrong := _wrong_in(record):
                raise UserError(
                    f"--resume: {self.history_path}, line {len(self.recorded) + 1}: {wrong}; "
                    "remove it and the lines behind it, or give another --output-path"
                )
            self.recorded.append(record)
            kept += line
        return kept


def _wrong_in(record: dict[str, Any]) -> str | None:
    """What a line of the history that is JSON lacks, or has of another kind; None for a good one."""
    of_search = {"fitness", "factors", "cached", "accuracy", "log_likelihood"}
    needed = {"fitness", "factors", "accuracies", "task_losses", "seconds"} if "step" in record else of_search
    if missing := sorted(needed - record.keys()):
        return f"no line of a history ({', '.join(missing)} missing)"
    if record["fitness"] is None and "step" not in record:
        needed = {"prompt", "first_layer"}
        if not isinstance(record.get("not_finite"), dict) or needed - record["not_finite"].keys():
            return "no line of a history (a fitness of null, and not where it is not finite)"
    wrong = [name for name, is_right in _RIGHT.items() if name in record and not is_right(record[name])]
    return f"no line of a history ({wrong[0]} is {record[wrong[0]]!r:.60})" if wrong else None


def _by_position(value: Any, *, nulls: bool = True) -> bool:
    """Numbers by position, or such records by the tasks of a mixture."""
    if not isinstance(value, dict) or not value:
        return False
    of_tasks = list(value.values()) if all(isinstance(of_task, dict) for of_task in value.values()) else [value]
    numbers = [number for of_task in of_tasks for number in of_task.values()]
    return all(of_tasks) and all((nulls and number is None) or is_number(number) for number in numbers)


def _factors(value: Any) -> bool:
    """Lists of numbers, or of null for a frequency that stands still."""

    def numbered(part: Any) -> Any:
        return [numbered(inner) for inner in part] if isinstance(part, list) else 1.0 if part is None else part

    return is_array(numbered(value)) and bool(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "fitness": lambda value: value is None or is_number(value),
    "factors": _factors,
    "gains": lambda value: is_array(value) and bool(value),
    "cached": lambda value: isinstance(value, bool),
    "accuracy": lambda value: _by_position(value, nulls=False),
    "log_likelihood": _by_position,
    "values": lambda value: isinstance(value, str),
    "raced": lambda value: is_number(value) and 0 < value <= 1,
    "accuracies": _numbers,
    "task_losses": _numbers,
    "seconds": lambda value: is_number(value) and value >= 0,
    "step": is_number,
    "generation": is_number,
}


def _arrays(path: Path) -> list[np.ndarray]:
    """Of an .npz file; none of one that is not there, or not whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            return [saved[name] for name in saved.files]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return []
