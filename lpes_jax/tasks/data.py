"""Reading a benchmark's files, and which of their examples a search may see. Every complaint names the file and the line."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lpes_jax.errors import UserError
from lpes_jax.tasks.prompts import Split
from lpes_jax.text_files import OtherEncoding, open_text

E = TypeVar("E")


def split_of(text: str, search: int = 2, of: int = 5) -> Split:
    """`search` for `search` in `of` texts, `test` for the others: a hash of the text and nothing else."""
    return "search" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % of < search else "test"


def content_id(*content: Any) -> str:
    """16 hexadecimal characters that stand for the content."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def take(examples: Sequence[E], split: Split, count: int | None, splits: Callable[[E], Split], path: Path | None) -> list[E]:
    """The first `count` examples (None: all) of the split, in their order."""
    if count is not None and count < 0:
        raise UserError(f"--limit must not be negative, got {count}")
    chosen = [example for example in examples if split in ("all", splits(example))]
    if count is not None and len(chosen) < count:
        raise UserError(
            f"--data {path}: {count} examples asked for, its {split!r} split has {len(chosen)}; lower --limit"
            + ("" if split == "all" else f", or use --split all ({len(examples)}) where no search has seen this file")
        )
    return chosen if count is None else chosen[:count]


def json_rows(path: Path, columns: Sequence[str], what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a .jsonl or .jsonl.gz; `where` is for further complaints, `what` says what a row should have been.

    Raises UserError for a line that is not a JSON object with all of `columns`, and for a file that is not readable.
    """
    number = 0
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix("\ufeff")  # each file of several that were joined may begin with a byte-order mark
                if line.strip():
                    where = f"--data {path}, line {number}"
                    yield where, _row(line, columns, f"{where}: not {what}")
    except (OSError, EOFError, zlib.error, OtherEncoding, UnicodeDecodeError) as error:
        raise UserError(f"--data {path}: not readable as .jsonl or .jsonl.gz after line {number} ({error})") from error


def need_file(path: Path | None, source: str) -> Path:
    """`path`, which must be a file; `source` says where such files come from."""
    if path is None:
        raise UserError(f"--data is needed: {source}")
    if not path.is_file():
        raise UserError(f"--data {path}: no such file; {source}")
    return path


def _row(line: str, columns: Sequence[str], complaint: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{complaint} (no JSON)") from error
    if not isinstance(row, dict):
        raise UserError(f"{complaint} (no JSON object)")
    missing = [column for column in columns if column not in row]
    if missing:
        raise UserError(f"{complaint} (without {', '.join(missing)})")
    return row
