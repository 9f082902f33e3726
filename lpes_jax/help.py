"""The short `--help`: the flags of the chosen task and algorithm, and those that every run needs, one per line.

The definition of a flag says when it is shown (lpes_jax/settings/tree.py: `when`, `shown`, `rare`). tyro prints
`--help-all`, which shows all flags.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lpes_jax.settings import Settings
from lpes_jax.settings.tree import RARE, SHOWN, WHEN, unmet

_COLUMN = 30  # the column in which the text of a flag begins
_EXAMPLES = 2
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Line:
    """A flag in the help: its name (`--limit`), its value (`INT`; empty for a switch), and its description."""

    flag: str
    value: str
    text: str


def short_help(defaults: Settings, given: Settings, prog: str, manual: str, width: int, left_out: int = 0) -> str:
    """The text of `--help`, in lines of `width` characters.

    `given` are the settings with the other flags on the command line. `left_out` is the number of flags that are not in the
    settings of the verb, and therefore in `--help-all` only.
    """
    groups = sections(defaults, given)
    lines = [f"usage: {prog} [flags]; what is in [...] is a default", "", *_head(manual, width)]
    for heading, flags in groups:
        lines += ["", f"{heading}:", *(line for flag in flags for line in _printed(flag, width))]
    left_out += len(defaults.flat()) - sum(len(flags) for _, flags in groups)
    hidden = f"the other {left_out} flag{'s' * (left_out > 1)}, and " if left_out else ""
    last = [f"--help-all shows {hidden}more of each."]
    deciding = [f"--{name}" for name in ("task", "algorithm", "preset") if name in defaults.flat()]
    if deciding:
        last += [f"Others have other flags: give {' or '.join(deciding)} with --help."]
    return "\n".join([*lines, "", *last]) + "\n"


def sections(defaults: Settings, given: Settings) -> list[tuple[str, list[Line]]]:
    """The headings of the shown groups and their flags. A flag without a group belongs to the next group."""
    chosen, found, first = given.chosen(), list[tuple[str, list[Line]]](), list[Line]()
    for field in dataclasses.fields(defaults):
        value = getattr(defaults, field.name)
        if not _is_shown(field.metadata, chosen):
            continue
        if not isinstance(value, Settings):
            first.append(_line(defaults, field.name))
            continue
        shown = [inner.name for inner in dataclasses.fields(value) if _is_shown(inner.metadata, chosen)]
        if lines := [*first, *(_line(value, name) for name in shown)]:
            found.append((_first_line(type(value).__doc__ or "").rstrip("."), lines))
            first = []
    return found + ([(_first_line(type(defaults).__doc__ or "").rstrip("."), first)] if first else [])


def _is_shown(metadata: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    return not metadata.get(RARE) and unmet(metadata.get(WHEN, {}) | metadata.get(SHOWN, {}), chosen) is None


def _line(group: Settings, name: str) -> Line:
    value, hint = getattr(group, name), _hints(type(group))[name]
    text = _first_line(documented(type(group)).get(name, ""))
    if not (value is None or isinstance(value, bool) or value == () or "default" in text):
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        text = f"{text} [{shown}]"
    flag = ("--no-" if value is True else "--") + name.replace("_", "-")  # a switch that is on by default can be turned off
    return Line(flag, _taken(hint), text)


def _taken(hint: Any) -> str:
    """The value of a flag of this type, in capitals; with `...` if there may be several."""
    if hint is bool:
        return ""
    parts = [part for part in typing.get_args(hint) if part not in (type(None), ...)]
    if typing.get_origin(hint) is tuple:
        return f"{_taken(parts[0])}..."
    if typing.get_origin(hint) is typing.Literal:
        return "NAME"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        words = [_taken(part) for part in parts]
        return next((word for word in words if word.endswith("...")), words[0])
    return _WORDS.get(hint, "TEXT")


def documented(group: type[Settings]) -> dict[str, str]:
    """The docstrings of a group's flags by name, including those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(group.__mro__):
        if not (isinstance(base, type) and issubclass(base, Settings)):
            continue
        body = _classes(base.__module__).get(base.__name__, [])
        for statement, below in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(below, ast.Expr):
                if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                    found[statement.target.id] = inspect.cleandoc(below.value.value)
    return found


@cache
def _classes(module: str) -> dict[str, Sequence[ast.stmt]]:
    """The statements of each class of a module; empty if its source is missing."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return {}
    return {node.name: node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


@cache
def _hints(group: type[Settings]) -> dict[str, Any]:
    return typing.get_type_hints(group)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _head(manual: str, width: int) -> Iterator[str]:
    """The first paragraph and the first examples of a verb's manual."""
    paragraph, _, rest = manual.strip().partition("\n\n")
    yield from textwrap.wrap(" ".join(paragraph.split()), width)
    if examples := re.match(r"Examples:\n((?:  .*\n?)*)", rest):
        listed = re.findall(r"  \S.*\n(?:      .*\n?)*", examples[1].rstrip() + "\n")
        yield from ("", "Examples:", *"".join(listed[:_EXAMPLES]).rstrip().splitlines())


def _printed(line: Line, width: int) -> Iterator[str]:
    flag = f"  {line.flag} {line.value}".rstrip()
    texts = textwrap.wrap(line.text, max(20, width - _COLUMN))
    if len(flag) > _COLUMN - 2:
        yield flag
        flag = ""
    for text in texts or [""]:
        yield f"{flag:<{_COLUMN}}{text}".rstrip()
        flag = ""
