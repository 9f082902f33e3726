"""The finished parts of a run, in OUT/unfinished until the results are written.

A run that measures many things in turn (a comparison: methods) stores a record of each finished part, and resumes after the
last one. `begun.json` contains everything that affects the results; `NAME.KIND.json` is the record of a part. Without
`begun.json` the records' origin is unknown, and they are not used. The folder is locked while a run uses it.
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
    """The records of finished parts, locked until `close`.

    Attributes:
        records: By kind and by the part's name; at first those on the disk.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        kinds: Mapping[str, Callable[[dict[str, Any]], object]],
        resume: bool,
        overwrite: bool = False,
    ):
        """Open the folder.

        Args:
            folder: The output folder.
            config: Everything that affects the results.
            kinds: For each kind a function that raises KeyError, TypeError or ValueError for a damaged record.
            resume: Whether to continue the parts on the disk. They must have the same `config` (`check_resumed`).
            overwrite: Whether to drop them.

        Raises:
            UserError: The folder has parts and neither flag is set, or they cannot be resumed.
        """
        self.path, self._folder, self._config = folder / "unfinished", folder, json.loads(json.dumps(config))
        self._begun, self._is_new = self.path / "begun.json", not folder.exists()
        self._lock: IO[str] | None = None
        exists = self.path.exists()
        if resume and not exists:
            raise UserError(f"--resume: {folder} contains no interrupted comparison; remove --resume to start one")
        if exists and not (resume or overwrite):
            raise UserError(
                f"--output-path {folder} contains an interrupted comparison; pass --resume to continue, give another folder, "
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
        """Add the record of a part. It is on the disk when this returns."""
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
        """Remove the files, `begun.json` first, and unlock the folder. Call this when the results are written."""
        self._begun.unlink(missing_ok=True)
        self.close()
        shutil.rmtree(self.path)

    def discard(self) -> None:
        """Remove the files, and the output folder if this run made it. Call this if the run turns out to be impossible."""
        if self._lock is not None:
            self.drop()
            if self._is_new:
                with contextlib.suppress(OSError):  # another command wrote into it
                    self._folder.rmdir()

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """On SIGINT or SIGTERM in here, print how to continue."""

        def way_out() -> str:
            if not self._begun.exists():
                return "interrupted before anything was measured"
            return f"interrupted; results so far are in {self.path}: run the same command with --resume to continue"

        return process.saying(way_out)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        way_out = "make room, then continue with --resume" if self._begun.exists() else "give another folder"
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
                raise UserError(f"{path}: not a record of a comparison ({error!r:.60}); delete it") from error
            records[path.name.partition(".")[0]] = record
        return records
