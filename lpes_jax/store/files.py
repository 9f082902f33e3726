"""Files that are on the disk whole or not at all, the one error for those that cannot be written, and the lock of a folder.

    with writing("--output-path runs/a"):                     # an OSError in here becomes one line for the user
        with replacing(folder / "weights.bin") as part:       # any writer
            part.write_bytes(data)
        write_json(folder / "results.json", record)

A file is written under its name and `.part`, and renamed when its contents are on the disk (fsync). No reader ever sees half a
file, and where the writing fails, or the process or the machine dies, the file that was there before stays.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lpes_jax.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def replacing(path: Path, *, part: Path | None = None, previous: Path | None = None) -> Iterator[Path]:
    """Yield the name to write a file under; when this is left, the file is on the disk at `path`.

    `part`: another name to write under, on the same file system. `previous`: the name that an existing file is kept under.
    """
    part = part or path.with_name(path.name + ".part")
    try:
        yield part
        sync(part)
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file. A byte of a path that is no text is written as its escape, which JSON can read."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def write_json(path: Path, record: Any) -> None:
    """Write a JSON file. Raises ValueError for NaN and infinities, which are no JSON."""
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def writing(what: str, way_out: str = "give another folder") -> Iterator[None]:
    """Turn an OSError in here into a UserError that names `what` cannot be written, and the way out."""
    try:
        yield
    except OSError as error:
        raise unwritable(error, what, way_out) from error


def unwritable(error: Exception, what: str, way_out: str = "") -> UserError:
    """The error of what cannot be written."""
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return UserError(f"{what}: cannot be written ({reason}){way_out and f'; {way_out}'}")


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk, where the system can say so."""
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs what is open for writing
    try:
        os.fsync(descriptor)
    except OSError:  # folders of some file systems
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock(file: IO[Any], folder: Path) -> None:
    """Lock an open file of a run's folder until it is closed, which the end of the process does at the latest.

    Raises UserError where another process holds the lock. Where the file system has no locks, a note says so.
    """
    try:
        if fcntl is None:
            raise OSError
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"--output-path {folder}: another process is working in this folder; wait for it, or give another folder"
        ) from None
    except OSError:
        print(f"note: {folder} cannot be locked here; let no other process write to it", file=sys.stderr)
