"""The finished parts of a run: OUT/unfinished, until its results are written.

A run that measures many things in turn (a comparison: methods) keeps a record of each part when it is done, and goes on behind
them. `begun.json` says what decides the results. Beside it lie `NAME.KIND.json`, a record of each part and kind. Without
`begun.json` nothing can be told of the others, and they are not taken. The folder is locked while a run works in it.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.json_files import read_json
from lpes_jax.store import files
from lpes_jax.store.provenance import check_resumed


class Parts:
    """`records`: those of each kind by the part's name, at first those on the disk. Locked until `close`.

    `kinds` gives for each kind the function that raises KeyError, TypeError or ValueError for a damaged record. Raises
    UserError for a folder that holds such files, unless it is to be resumed and `config` is as it was (`check_resumed`).
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        kinds: Mapping[str, Callable[[dict[str, Any]], object]],
        resume: bool,
        overwrite: bool = False,
    ):
        self.path, self._folder, self._config = folder / "unfinished", folder, json.loads(json.dumps(config))
        self._begun = self.path / "begun.json"
        self._lock: IO[str] | None = None
        exists = self.path.exists()
        if resume and not exists:
            raise UserError(f"--resume: {folder} holds no comparison that was cut off; leave --resume out to begin one")
        if exists and not (resume or overwrite):
            raise UserError(
                f"--output-path {folder} holds a comparison that was cut off; give --resume to go on with it, another folder, "
                f"or delete {self.path}"
            )
        try:
            if exists:
                self._open()
            if exists and (overwrite or not self._begun.exists()):
                self.drop()
            elif exists:
                check_resumed(folder, read_json(self._begun, dict, hint=f"; delete {self.path}"), self._config)
            self.records = {kind: self._read(kind, check) for kind, check in kinds.items()}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def keep(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Add the record of a part; it is on the disk when this returns."""
        with self._writing():
            if self._lock is None:
                self._open()
                files.write_json(self._begun, self._config)
            files.write_json(self.path / f"{name}.{kind}.json", record)
        self.records[kind][name] = record

    def forget(self, kind: str, name: str) -> None:
        """Remove the record of a part, if there is one."""
        (self.path / f"{name}.{kind}.json").unlink(missing_ok=True)
        self.records[kind].pop(name, None)

    def drop(self) -> None:
        """Remove the files, `begun.json` first, and unlock the folder: the results are written."""
        self._begun.unlink(missing_ok=True)
        self.close()
        shutil.rmtree(self.path)

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """A SIGINT or SIGTERM in here says how to go on."""

        def way_on() -> str:
            if not self._begun.exists():
                return "interrupted, and nothing was measured yet"
            return f"interrupted; what was measured is in {self.path}: the same command with --resume goes on from there"

        return process.saying(way_on)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        way_out = "make room, then go on with --resume" if self._begun.exists() else "give another folder"
        return files.writing(f"--output-path {self._folder}", way_out)

    def _open(self) -> None:
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        files.lock(self._lock, self._folder)

    def _read(self, kind: str, check: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        records: dict[str, Any] = {}
        for path in self.path.glob(f"*.{kind}.json"):
            record = read_json(path, dict, hint="; delete it")
            try:
                check(record)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise UserError(f"{path}: not what a comparison leaves there ({error!r:.60}); delete it") from error
            records[path.name.partition(".")[0]] = record
        return records
