"""Readers of a benchmark's files, and which examples a search may see. Every error names the file and the line."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lpes_jax.errors import UserError
from lpes_jax.json_files import parse_json
from lpes_jax.limits import check_text_size
from lpes_jax.tasks.prompts import Split
from lpes_jax.text_files import UNREADABLE, open_text

E = TypeVar("E")


def split_of(text: str, search: int = 2, of: int = 5) -> Split:
    """`search` for `search` in `of` texts, `test` for the others, by a hash of the text only."""
    return "search" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % of < search else "test"


def content_id(*content: Any) -> str:
    """A hash of the content: 16 hexadecimal characters."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def generated_count(count: int | None, what: str, item: str, characters: int, way_out: str) -> int:
    """The number of examples to generate. Raises UserError if it is None or negative, or the examples would be too large.

    Args:
        count: The user's --limit.
        what: What is generated, in the plural.
        item: The flag that sets the size of an example.
        characters: Characters per example.
        way_out: The flags that lower the size.
    """
    if count is None:
        raise UserError(f"generated {what} need a --limit")
    if count < 0:
        raise UserError(f"--limit must not be negative, got {count}")
    check_text_size(count, item, characters, way_out)
    return count


def take(examples: Sequence[E], split: Split, count: int | None, splits: Callable[[E], Split], path: Path | None) -> list[E]:
    """The first `count` examples (None: all) of the split, in their order. Raises UserError if there are fewer."""
    if count is not None and count < 0:
        raise UserError(f"--limit must not be negative, got {count}")
    chosen = [example for example in examples if split in ("all", splits(example))]
    if count is not None and len(chosen) < count:
        raise UserError(
            f"--data {path}: {count} examples asked for, its {split!r} split has {len(chosen)}; lower --limit"
            + ("" if split == "all" else f", or use --split all ({len(examples)}) if no search has used this file")
        )
    return chosen if count is None else chosen[:count]


def json_rows(path: Path, columns: Sequence[str], what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of a .jsonl or .jsonl.gz file.

    Args:
        path: The file.
        columns: Keys that each row must have.
        what: What a row should be, for error messages.

    Yields:
        The position in the file, to begin error messages with, and the row.

    Raises:
        UserError: A line is not a JSON object with all of `columns`, or the file cannot be read.
    """
    number = 0
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix("\ufeff")  # concatenated files may each begin with a byte-order mark
                if line.strip():
                    where = f"--data {path}, line {number}"
                    yield where, _row(line, columns, where, f"not {what}")
    except UNREADABLE as error:
        raise UserError(f"--data {path}: not readable as .jsonl or .jsonl.gz after line {number} ({error})") from error


def need_file(path: Path | None, source: str) -> Path:
    """Return `path`, which must be a file; `source` tells where such files come from."""
    if path is None:
        raise UserError(f"--data is needed: {source}")
    if not path.is_file():
        raise UserError(f"--data {path}: {'a folder, not a file' if path.is_dir() else 'no such file'}; {source}")
    return path


def _row(line: str, columns: Sequence[str], where: str, complaint: str) -> dict[str, Any]:
    row = parse_json(line, where, finite=False, what=f"{complaint}, because it is not JSON")
    if not isinstance(row, dict):
        raise UserError(f"{where}: {complaint} (not a JSON object)")
    missing = [column for column in columns if column not in row]
    if missing:
        raise UserError(f"{where}: {complaint} (without {', '.join(missing)})")
    return row
