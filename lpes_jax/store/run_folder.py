"""The folder of a run: `config.json`, then `history.jsonl` line by line, then the results, `results.json` last.

The history is the state. A search is a function of its settings and of the scores it has received. To resume an interrupted
run, it is repeated from the start with the scores of the history in place of the model's. It makes the same candidates, and
continues where the lines end. A gradient search has no scores to replay; it saves `state.npz` with each line, and keeps the
previous state as `state.previous.npz`.

A run can be resumed after a kill, a full disk or a power cut. Lines are on the disk (fsync) before the search continues, an
incomplete line is dropped, and all other files are written under another name and renamed when they are on the disk. While a
run is open, its history is locked (flock) until the process ends, however it ends. On file systems without such locks a note
asks the user to make sure that only one process writes to the folder.

With several processes (lpes_jax.hosts), the first one owns the folder. It sends the others what it reads, and each checks that
its own lines are the same.
"""

import contextlib
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
    """A run's files, locked until `close`. Raises UserError if the folder contains another run, or another process uses it."""

    def __init__(self, path: Path, config: dict[str, Any], resume: bool, overwrite: bool = False):
        """Open the folder.

        Args:
            path: The folder.
            config: Everything that affects the run's results, and the `environment`. A resumed run must have the same, except
                for the environment and for the paths of files, whose contents are hashed.
            resume: Whether to continue a run.
            overwrite: Whether to drop the run in the folder.
        """
        self.path = path
        self.history_path, self.state_path = path / "history.jsonl", path / "state.npz"
        self._history: Any = None
        self._is_new, self._made = not resume, not path.exists()
        self.recorded, self.resumed = hosts.from_first(lambda: self._open(config, resume, overwrite))

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, UserError) and not isinstance(error.__cause__, OSError):  # a full disk: --resume continues
                self._drop_unscored()
        finally:
            self.close()

    def _drop_unscored(self) -> None:
        """Remove the files of a new run that turned out to be impossible before anything was scored."""
        if self._history is None or not self._is_new or os.fstat(self._history.fileno()).st_size:
            return
        with contextlib.suppress(OSError):  # another command wrote into it
            (self.path / "config.json").unlink(missing_ok=True)
            self.history_path.unlink()
            if self._made:
                self.path.rmdir()

    def close(self) -> None:
        """Unlock the folder. All files have been written."""
        if self._history is not None:
            self._history.close()

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add lines to the history. They are on the disk when this returns.

        Raises UserError if another process has other lines, or the file cannot be written.
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
        """Drop all lines of the history after the first `count`; return the remaining ones."""
        self.recorded = self.recorded[:count]
        if not hosts.is_first():
            return list(self.recorded)
        lines = self.history_path.read_bytes().splitlines(keepends=True)[:count]
        with self.writing():
            os.truncate(self.history_path, sum(map(len, lines)))
            self._history.seek(0, os.SEEK_END)
        return list(self.recorded)

    def save_state(self, state: Any) -> None:
        """Save a pytree's numbers beside the history, atomically, and keep the previous ones."""
        if not hosts.is_first():
            return
        with self.writing():
            with files.replacing(self.state_path, previous=self._previous_path) as part, part.open("wb") as file:
                np.savez(file, *[np.asarray(leaf) for leaf in jax.tree.leaves(state)])
            files.sync(self.path)

    def states(self, like: Any) -> Iterator[Any]:
        """Yield the readable saved states, newest first, in the structure and types of `like`."""
        leaves, structure = jax.tree.flatten(like)
        types = [type(leaf) if isinstance(leaf, bool | int | float) else jnp.asarray for leaf in leaves]
        for path in (self.state_path, self._previous_path):
            kept = hosts.from_first(lambda path=path: _arrays(path))
            try:
                state = [kind(value) for kind, value in zip(types, kept, strict=True)]
            except (ValueError, TypeError):  # incomplete, or from another search
                continue
            yield jax.tree.unflatten(structure, state)

    def settle(self) -> None:
        """Wait until all files of the folder are on the disk."""
        for path in self.path.iterdir():
            files.sync(path)

    def must_continue(self, draft: dict[str, Any], record: dict[str, Any]) -> None:
        """Raise UserError if a line of the history is not the individual that this search makes at this point."""
        if any(draft[name] != record.get(name) for name in draft):
            raise UserError(
                f"--resume: individual {draft['id']} of {self.history_path} is not the one that this search makes "
                "(another version of the program or of JAX?); give another --output-path"
            )

    def writing(self) -> AbstractContextManager[None]:
        """Turn an OSError in here, such as for a full disk, into a UserError that says how to continue."""
        way_out = "make room, then continue with --resume" if self.history_path.exists() else "give another folder"
        return files.writing(f"--output-path {self.path}", way_out)

    def _open(self, config: dict[str, Any], resume: bool, overwrite: bool) -> tuple[list[dict[str, Any]], bool]:
        """Open and lock the folder. Returns its records, and whether a run continues there."""
        path, self.recorded = self.path, []
        started = self.history_path.exists() or (path / "config.json").exists()
        if resume and not started and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"--resume: {path} contains no run (no config.json); remove --resume to start one")
        if not (resume or overwrite) and self.history_path.exists():
            raise UserError(f"--output-path {path} already contains a run; pass --resume to continue, or give another folder")
        with self.writing():
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._history = self.history_path.open("a+b" if resume or overwrite else "xb", buffering=0)
            except FileExistsError as error:
                if not path.is_dir():
                    raise UserError(f"--output-path {path}: a file is there, not a folder; give another folder") from error
                # Another process has just started a run.
                raise UserError(f"--output-path {path} already contains a run; give another folder") from error
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
        """config.json; None if it is damaged and no lines depend on it."""
        try:
            return read_json(self.path / "config.json", dict)
        except UserError:
            if needed:
                raise
            return None

    def _whole_lines(self) -> bytes:
        """The lines of the history before the first incomplete one; their records are appended to `recorded`."""
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
                    "remove it and the lines after it, or give another --output-path"
                )
            self.recorded.append(record)
            kept += line
        return kept


def _wrong_in(record: dict[str, Any]) -> str | None:
    """What is wrong with a line of the history that is JSON; None for a good line."""
    population_keys = {"fitness", "factors", "cached", "accuracy", "log_likelihood"}
    needed = {"fitness", "factors", "accuracies", "task_losses", "seconds"} if "step" in record else population_keys
    if missing := sorted(needed - record.keys()):
        return f"not a line of a history ({', '.join(missing)} missing)"
    if record["fitness"] is None and "step" not in record:
        needed = {"prompt", "first_layer"}
        if not isinstance(record.get("not_finite"), dict) or needed - record["not_finite"].keys():
            return "not a line of a history (a fitness of null without the point where scores become not finite)"
    wrong = [name for name, is_right in _RIGHT.items() if name in record and not is_right(record[name])]
    return f"not a line of a history ({wrong[0]} is {record[wrong[0]]!r:.60})" if wrong else None


def _by_position(value: Any, *, nulls: bool = True) -> bool:
    """Whether the value has numbers by position, or such records for each task of a mixture."""
    if not isinstance(value, dict) or not value:
        return False
    tasks = list(value.values()) if all(isinstance(task, dict) for task in value.values()) else [value]
    numbers = [number for task in tasks for number in task.values()]
    return all(tasks) and all((nulls and number is None) or is_number(number) for number in numbers)


def _factors(value: Any) -> bool:
    """Whether the value has lists of numbers, with null for a frequency that does not rotate."""

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
    """The arrays of an .npz file; none if it is missing or incomplete."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            return [saved[name] for name in saved.files]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return []
