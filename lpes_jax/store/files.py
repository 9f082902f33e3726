"""Atomic writes of files, the error for a file that cannot be written, and the lock of a folder.

    with writing("--output-path runs/a"):                     # an OSError in here becomes one line for the user
        with replacing(folder / "weights.bin") as part:       # for any writer
            part.write_bytes(data)
        write_json(folder / "results.json", record)

A file is written under its name plus `.part`, and renamed when its contents are on the disk (fsync). A reader never sees half a
file. If writing fails, or the process or the machine dies, the earlier file stays.
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
    """Yield the path to write a file under. On exit, the file is on the disk at `path`.

    Args:
        path: The final path.
        part: Another path to write under, on the same file system.
        previous: The path at which to keep an existing file.
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
    """Write a UTF-8 file. Bytes of a path that are not text are written as escapes, which JSON can read."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def write_json(path: Path, record: Any) -> None:
    """Write a JSON file. Raises ValueError for NaN and infinities, which are not JSON."""
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def writing(what: str, way_out: str = "give another folder") -> Iterator[None]:
    """Turn an OSError in here into a UserError: `what` cannot be written, and the way out."""
    try:
        yield
    except OSError as error:
        raise unwritable(error, what, way_out) from error


def unwritable(error: Exception, what: str, way_out: str = "") -> UserError:
    """The error for something that cannot be written."""
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return UserError(f"{what}: cannot be written ({reason}){way_out and f'; {way_out}'}")


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk, if the system supports it."""
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs only files open for writing
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot sync folders
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock(file: IO[Any], folder: Path) -> None:
    """Lock an open file of a run's folder until it is closed, at the latest when the process ends.

    Raises UserError if another process holds the lock. If the file system has no locks, prints a note.
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
        print(f"note: {folder} cannot be locked; make sure that no other process writes to it", file=sys.stderr)
