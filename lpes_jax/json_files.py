"""The project's JSON reader: it bounds sizes, checks the type, and reports errors as a UserError in one line.

    record = read_json(path, dict)          # a file
    row = parse_json(line, "FILE, line 7", dict)

It refuses input that the standard library accepts but that breaks later code: very deep nesting, numbers of thousands of
digits, NaN and infinities (which are not JSON), and lone surrogates, which cannot be written as UTF-8.
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
MOST_DIGITS = 100  # per integer; transformers writes 10^30 for "no limit"
MOST_BYTES = 2**30
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: str | os.PathLike, kind: type | None = None, *, finite: bool = True, hint: str = "") -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        kind: The expected type, dict or list; None accepts any.
        finite: Whether to refuse NaN and infinities.
        hint: Follows the reason in error messages and tells the user what to do.

    Raises:
        UserError: The file is missing, unreadable, not JSON, or not of type `kind`.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: larger than {MOST_BYTES:,} bytes, too large for a JSON file{hint}")
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
    """Parse JSON text.

    Args:
        text: The text.
        where: Begins error messages.
        kind: The expected type, dict or list; None accepts any.
        finite: Whether to refuse NaN and infinities. Pass False for third-party files that contain them in unused entries.
        what: The complaint about text that is not JSON.
        hint: Follows the reason and tells the user what to do.

    Raises:
        UserError: The text is not JSON, or not of type `kind`.
    """
    try:
        value = json.loads(
            text, parse_int=_integer, parse_float=_finite if finite else float, parse_constant=_constants[finite]
        )
        _check_depth(value)
        if _HALF_A_PAIR.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")  # escapes stand for bytes of a path
    except RecursionError as error:
        raise UserError(f"{where}: {what} (nested more than {MOST_DEPTH} levels deep){hint}") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {what} (half of a surrogate pair, as in \\ud800, is not a character){hint}") from error
    except ValueError as error:
        raise UserError(f"{where}: {what} ({_one_line(error)}){hint}") from error
    if kind is not None and not isinstance(value, kind):
        raise UserError(f"{where}: must be {_NAMES[kind]} in JSON, got {kind_of(value)}{hint}")
    return value


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    return "null" if value is None else _NAMES[type(value)]


def is_number(value: Any) -> bool:
    """Whether the value is a finite number that fits into an array (true and false are not numbers)."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def is_array(value: Any, *, finite: bool = True) -> bool:
    """Whether the value is a list of numbers, or of such lists with equal shapes. `finite=False` allows NaN and infinities."""
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
        raise ValueError(f"{digits[:20]} is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


_constants = {True: _no_constant, False: float}


def _check_depth(value: Any) -> None:
    """Raise RecursionError for nesting that is too deep; the parser's own limit depends on the Python version."""
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
