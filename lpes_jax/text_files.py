"""Text files that users bring: UTF-8, with a byte-order mark or without one, gzipped where the name ends in .gz.

Text in UTF-16 or UTF-32, which some editors and shells write, is refused by its name.
"""

import codecs
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_MARKS = {  # UTF-32's little-endian mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class OtherEncoding(ValueError):
    """A file in an encoding other than UTF-8; the message names the encoding and the way out."""


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """The text of a file; gzipped where the name ends in .gz. `newline` is that of `open`.

    Raises OSError, EOFError or zlib.error for a file that cannot be read, OtherEncoding for UTF-16 and UTF-32, and
    UnicodeDecodeError (both are ValueErrors) for any other bytes that are not UTF-8.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        head = file.read(4)
        if encoding := _other_encoding(head):
            raise OtherEncoding(f"it is {encoding} text; save it as UTF-8")
        file.seek(0)
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
            yield text


def read_text(path: Path) -> str:
    """The whole text of a file. Raises as `open_text` does."""
    with open_text(path) as text:
        return text.read()


def _other_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, by the first four bytes: a byte-order mark, or zeros beside an ASCII character."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    zeros = [byte == 0 for byte in head]
    if zeros in ([False, True, True, True], [True, True, True, False]):
        return "UTF-32"
    return "UTF-16" if zeros in ([False, True, False, True], [True, False, True, False]) else None
