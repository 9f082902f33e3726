"""Where results go: `--output-path`, looked at before anything is computed, and filled when all of it is known.

A folder that holds a run is no place for another: a finished one is replaced only by a run of its kind, and with --overwrite.
`evaluate` and `compare` are of one kind, they leave the same files; a search is told by its `history.jsonl`, an exported model
by `exported.json` or `lpes_torch.py`. Other files in a folder are left alone.
"""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.store import files

Verb = Literal["search", "evaluate", "compare", "export", "profile"]
_TOLD_BY = {  # in this order
    "history.jsonl": "search",
    "exported.json": "export",
    "lpes_torch.py": "export",  # of the first release
    "profile.json": "profile",
    "results.json": "measured",
}
_CALLED = {
    **{"search": "a search", "export": "an exported model", "profile": "a profile"},
    "measured": "the results of an evaluation or comparison",
}
_KIND = {"search": "search", "export": "export", "profile": "profile", "evaluate": "measured", "compare": "measured"}
_LAST = ("results.json", "profile.json")  # of a run: they say that the other files are whole
_SHARED = ("results.json", "results.md", "samples.jsonl", "report.html", "positions*.png", "positions*.svg")
MEASURED = (*_SHARED, "depth_by_length_*", "profile.json", "profile.md", "heat_*", "text_loss.*")
SEARCHED = (
    *(*_SHARED, "config.json", "factors.json", "uniform.json", "state*.npz", "part.npz", "*.part"),
    *("factors.png", "factors.svg", "history.png", "history.svg"),
)  # beside the history


def check(folder: Path, verb: Verb, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raise UserError where a run of this verb cannot be written to the folder. Nothing is left of the attempt.

    `resume`: a run is to go on there, so that one of its own kind is no obstacle.
    """
    if overwrite and resume:
        raise UserError("--resume goes on with the run in --output-path and --overwrite drops it; give one of the two")
    _try(folder)
    name = next((name for name in _TOLD_BY if os.path.lexists(folder / name)), None)
    is_own = name is not None and _TOLD_BY[name] == _KIND[verb]
    if name is not None and not is_own:
        raise UserError(f"--output-path {folder} holds {_CALLED[_TOLD_BY[name]]} ({name}); give another folder")
    if verb == "search" and name is None and not resume and os.path.lexists(folder / "config.json"):
        raise UserError(f"--output-path {folder} holds a config.json that is none of a search's; give another folder")
    unfinished = folder / "unfinished"
    if unfinished.exists() and (verb != "compare" or not (overwrite or resume)):
        way_on = "give --resume to go on with it, another folder, or" if verb == "compare" else "give another folder, or"
        raise UserError(f"--output-path {folder} holds a comparison that was cut off; {way_on} delete {unfinished}")
    if overwrite or resume:
        return
    if is_own and verb == "search":
        way_on = "give --resume to go on with it, another folder, or --overwrite to begin anew"
        raise UserError(f"--output-path {folder} holds a run already; {way_on}")
    if is_own:
        raise UserError(f"--output-path {folder} holds a finished run ({name}); give another folder, or --overwrite")


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[Path]:
    """The folder, made here; where there is one, FOLDER-2, FOLDER-3, ... It is removed if nothing is in it at the end.

    Two processes that ask at once get two folders.
    """
    number, chosen = 1, folder
    with _writing(folder):
        made = _make(folder.parent)
    while True:
        try:
            with _writing(chosen):
                chosen.mkdir()
            break
        except UserError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            number += 1
            chosen = folder.with_name(f"{folder.name}-{number}")
    if chosen != folder:
        print(f"note: {folder} is taken, so this run goes to {chosen}", file=sys.stderr)

    def give_back() -> None:
        _remove([*made, chosen])

    with process.cleaning(give_back):
        try:
            yield chosen
        finally:
            give_back()


def latest(folder: Path) -> Path:
    """Of FOLDER, FOLDER-2, FOLDER-3, ... the one that was written to last."""
    name = re.compile(re.escape(folder.name) + r"(-\d+)?")
    try:
        found = [path for path in folder.parent.iterdir() if name.fullmatch(path.name) and path.is_dir()]
        return max(found, key=lambda path: path.stat().st_mtime, default=folder)
    except OSError:
        return folder


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A new folder to write results to; their files are in `folder` when this is left, `results.json` or `profile.json` last.

    All are there or none is: after an error, or where a signal ends this process meanwhile, nothing was touched. Files that
    measured results which stood there before have left are removed. Raises UserError where the files cannot be written.
    """
    with _writing(folder), process.unbroken():
        made = _make(folder)
        try:
            part = Path(tempfile.mkdtemp(dir=folder, prefix=".part-"))
            try:
                yield part
                if not process.is_ending():
                    _move(part, folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        finally:
            _remove(made)  # what is empty


def remove(folder: Path, patterns: tuple[str, ...], keep: frozenset[str] = frozenset()) -> None:
    """Remove the folder's files of these names, but those to keep."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _move(part: Path, folder: Path) -> None:
    new = sorted(part.iterdir(), key=lambda path: path.name in _LAST)
    for name in _LAST:
        (folder / name).unlink(missing_ok=True)
    for path in new:
        os.replace(path, folder / path.name)
    remove(folder, MEASURED, frozenset(path.name for path in new))


def _writing(folder: Path) -> contextlib.AbstractContextManager[None]:
    return files.writing(f"--output-path {folder}")


def _try(folder: Path) -> None:
    """Write to the folder, and leave everything as it was."""
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not path.is_dir():
            what = "a file" if path.exists() else "a link to nothing"
            raise UserError(f"--output-path {folder}: {path} is {what}, not a folder; give another folder")
    with _writing(folder):
        made = _make(folder)
        try:
            descriptor, path = tempfile.mkstemp(dir=folder, prefix=".part-")
            os.close(descriptor)
            os.unlink(path)
        finally:
            _remove(made)


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it; which ones there were not, the innermost last."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    for attempt in range(3):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return missing
        except FileNotFoundError:  # another process removed one that it had made
            if attempt == 2:
                raise
        except OSError:
            _remove(missing)
            raise
    raise AssertionError


def _remove(made: list[Path]) -> None:
    """Remove folders that are empty, the last first."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()
