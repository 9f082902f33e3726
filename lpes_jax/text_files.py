"""Reader of users' text files: UTF-8 with or without a byte-order mark; gzipped if the name ends in .gz.

UTF-16 and UTF-32, which some editors and shells write, are refused with a message that names the encoding.
"""

import codecs
import gzip
import io
import zlib
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


UNREADABLE = OSError, EOFError, zlib.error, OtherEncoding, UnicodeDecodeError
"""What `open_text` and `read_text` raise for a file that is not readable as text."""


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file; it is decompressed if its name ends in .gz. `newline` is as in `open`.

    Raises:
        OSError, EOFError, zlib.error: The file cannot be read.
        OtherEncoding: The text is UTF-16 or UTF-32 (a ValueError).
        UnicodeDecodeError: Other bytes that are not UTF-8 (a ValueError).
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        head = file.read(4)
        if encoding := _other_encoding(head):
            raise OtherEncoding(f"it is {encoding} text; save it as UTF-8")
        file.seek(0)
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
            yield text


def read_text(path: Path) -> str:
    """Read the whole text of a file. Raises as `open_text`."""
    with open_text(path) as text:
        return text.read()


def _other_encoding(head: bytes) -> str | None:
    """Detect UTF-16 or UTF-32 from the first four bytes: a byte-order mark, or zeros next to an ASCII character."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    zeros = [byte == 0 for byte in head]
    if zeros in ([False, True, True, True], [True, True, True, False]):
        return "UTF-32"
    return "UTF-16" if zeros in ([False, True, False, True], [True, False, True, False]) else None
