"""JSON as it is read everywhere: bounded, and of the kind that is expected, or a UserError in one line.

    record = read_json(path, dict)          # a file
    row = parse_json(line, "FILE, line 7", dict)

What the standard library takes and nothing here can go on with is refused: brackets within brackets without end, numbers of
thousands of digits, NaN and infinities (they are no JSON), and halves of surrogate pairs, which no file can hold as UTF-8.
"""

import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any

from lpes_jax.errors import UserError
from lpes_jax.text_files import read_text

MOST_DEPTH = 100
MOST_DIGITS = 100  # of an integer; transformers writes 10^30 for "no limit"
MOST_BYTES = 2**30
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: str | os.PathLike, kind: type | None = None, *, finite: bool = True, hint: str = "") -> Any:
    """The contents of a JSON file. Raises UserError where it is missing, or is none of `kind`, as `parse_json` does.

    `hint` stands behind the reason: what the user can do.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: larger than {MOST_BYTES:,} bytes, which no such file is{hint}")
        text = read_text(path)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}){hint}") from error
    except ValueError as error:  # not UTF-8, or a path with a null character
        raise UserError(f"{path}: not a JSON file ({_one_line(error)}){hint}") from error
    return parse_json(text, str(path), kind, finite=finite, hint=hint)


def parse_json(
    text: str | bytes,
    where: str,
    kind: type | None = None,
    *,
    finite: bool = True,
    what: str = "not a JSON file",
    hint: str = "",
) -> Any:
    """What `text` says. Raises UserError for what is no JSON, or not of `kind` (dict or list); `where` begins the message.

    `finite=False` lets NaN and infinities pass, for files of others that may have them where nobody looks.
    """
    try:
        value = json.loads(
            text, parse_int=_integer, parse_float=_finite if finite else float, parse_constant=_constants[finite]
        )
        _check_depth(value)
        if _HALF_A_PAIR.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")  # which stands for a byte of a path
    except RecursionError as error:
        raise UserError(f"{where}: {what} (more than {MOST_DEPTH} brackets within brackets){hint}") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {what} (half of a surrogate pair, as in \\ud800, is no character){hint}") from error
    except ValueError as error:
        raise UserError(f"{where}: {what} ({_one_line(error)}){hint}") from error
    if kind is not None and not isinstance(value, kind):
        raise UserError(f"{where}: must be {_NAMES[kind]} in JSON, got {kind_of(value)}{hint}")
    return value


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    return "null" if value is None else _NAMES[type(value)]


def is_number(value: Any) -> bool:
    """A finite number that arrays can hold, and no truth value."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def is_array(value: Any, *, finite: bool = True) -> bool:
    """A list of numbers, or of such lists that are all alike. `finite=False`: also NaN and infinities."""
    if not isinstance(value, list):
        return False
    if not any(isinstance(inner, list) for inner in value):
        return all(is_number(number) or (not finite and isinstance(number, float)) for number in value)
    shapes = {_shape(inner) for inner in value if is_array(inner, finite=finite)}
    return len(shapes) == 1 and all(is_array(inner, finite=finite) for inner in value)


def _shape(array: list[Any]) -> tuple[int, ...]:
    return (len(array), *(_shape(array[0]) if array and isinstance(array[0], list) else ()))


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is beyond all numbers")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


_constants = {True: _no_constant, False: float}


def _check_depth(value: Any) -> None:
    """Raise RecursionError for brackets too deep: the parser's own limit hangs on the version of Python."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
