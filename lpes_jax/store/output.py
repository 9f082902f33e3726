"""The folder of results, `--output-path`: checked before anything is computed, and filled when all results are known.

A folder that contains a run cannot take another. A finished run is replaced only by a run of its kind, with --overwrite.
`evaluate` and `compare` are of one kind, because they write the same files. A search is recognised by its `history.jsonl`, an
exported model by `exported.json` or `lpes_torch.py`. Other files in a folder are not touched.
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
_MARKERS = {  # file -> kind of run, in this order
    "history.jsonl": "search",
    "exported.json": "export",
    "lpes_torch.py": "export",  # written by the first release
    "profile.json": "profile",
    "results.json": "measured",
}
_NAMES = {
    **{"search": "a search", "export": "an exported model", "profile": "a profile"},
    "measured": "the results of an evaluation or comparison",
}
_KIND = {"search": "search", "export": "export", "profile": "profile", "evaluate": "measured", "compare": "measured"}
_LAST = ("results.json", "profile.json")  # written last: they show that the other files are complete
_SHARED = ("results.json", "results.md", "samples.jsonl", "report.html", "positions*.png", "positions*.svg")
MEASURED = (*_SHARED, "depth_by_length_*", "profile.json", "profile.md", "heat_*", "text_loss.*")
SEARCHED = (
    *(*_SHARED, "config.json", "factors.json", "uniform.json", "state*.npz", "part.npz", "*.part"),
    *("factors.png", "factors.svg", "history.png", "history.svg"),
)  # in addition to the history


def check(folder: Path, verb: Verb, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raise UserError if a run of this verb cannot be written to the folder. The check leaves no files.

    With `resume`, a run of the verb's own kind in the folder is allowed.
    """
    if overwrite and resume:
        raise UserError("--resume continues the run in --output-path and --overwrite drops it; give only one of them")
    _try(folder)
    name = next((name for name in _MARKERS if os.path.lexists(folder / name)), None)
    is_own = name is not None and _MARKERS[name] == _KIND[verb]
    if name is not None and not is_own:
        raise UserError(f"--output-path {folder} contains {_NAMES[_MARKERS[name]]} ({name}); give another folder")
    if verb == "search" and name is None and not resume and os.path.lexists(folder / "config.json"):
        raise UserError(f"--output-path {folder} contains a config.json that is not a search's; give another folder")
    unfinished = folder / "unfinished"
    if unfinished.exists() and (verb != "compare" or not (overwrite or resume)):
        way_out = "pass --resume to continue, give another folder, or" if verb == "compare" else "give another folder, or"
        raise UserError(f"--output-path {folder} contains an interrupted comparison; {way_out} delete {unfinished}")
    if overwrite or resume:
        return
    if is_own and verb == "search":
        way_out = "pass --resume to continue, give another folder, or --overwrite to start again"
        raise UserError(f"--output-path {folder} already contains a run; {way_out}")
    if is_own:
        raise UserError(f"--output-path {folder} contains a finished run ({name}); give another folder, or --overwrite")


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[Path]:
    """Make the folder, or FOLDER-2, FOLDER-3, ... if it exists, and yield it. On exit it is removed if it is empty.

    Two processes that ask at the same time get two folders.
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
        print(f"note: {folder} exists, so this run is written to {chosen}", file=sys.stderr)

    def remove_empty() -> None:
        _remove([*made, chosen])

    with process.cleaning(remove_empty):
        try:
            yield chosen
        finally:
            remove_empty()


def latest(folder: Path) -> Path:
    """The most recently changed one of FOLDER, FOLDER-2, FOLDER-3, ..."""
    name = re.compile(re.escape(folder.name) + r"(-\d+)?")
    try:
        found = [path for path in folder.parent.iterdir() if name.fullmatch(path.name) and path.is_dir()]
        return max(found, key=lambda path: path.stat().st_mtime, default=folder)
    except OSError:
        return folder


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write results to. On exit its files move to `folder`, `results.json` or `profile.json` last.

    Either all files are moved or none: after an error, or if a signal ends this process before, nothing has changed. Files of
    earlier results in the folder are removed. Raises UserError if the files cannot be written.
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
            _remove(made)  # only empty folders


def remove(folder: Path, patterns: tuple[str, ...], keep: frozenset[str] = frozenset()) -> None:
    """Remove the folder's files that match the patterns, except those in `keep`."""
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
    """Write to the folder, then restore its state."""
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not path.is_dir():
            kind = "a file" if path.exists() else "a broken link"
            raise UserError(f"--output-path {folder}: {path} is {kind}, not a folder; give another folder")
    with _writing(folder):
        made = _make(folder)
        try:
            descriptor, path = tempfile.mkstemp(dir=folder, prefix=".part-")
            os.close(descriptor)
            os.unlink(path)
        finally:
            _remove(made)


def _make(folder: Path) -> list[Path]:
    """Make a folder and its parents. Returns the folders that did not exist, the innermost last."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    for attempt in range(3):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return missing
        except FileNotFoundError:  # another process removed a folder that it had made
            if attempt == 2:
                raise
        except OSError:
            _remove(missing)
            raise
    raise AssertionError


def _remove(made: list[Path]) -> None:
    """Remove empty folders, the last first."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()
