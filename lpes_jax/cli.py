"""The command line: `lpes VERB ...`, the same as `python -m lpes_jax.VERB ...`.

A verb is a frozen dataclass of flags (tyro makes the parser and the help from it) and a function that takes one. Exit codes:
0 done, 2 the user's mistake (one line `error: ...` on stderr), 1 a fault of ours (a traceback).
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeVar

import tyro

from lpes_jax.errors import UserError

VERBS = {
    "search": "lpes_jax.search.__main__",
    "evaluate": "lpes_jax.evaluate.__main__",
    "compare": "lpes_jax.compare",
    "doctor": "lpes_jax.doctor",
}
Flags = TypeVar("Flags")


def main(arguments: Sequence[str] | None = None) -> int:
    """`lpes VERB ...`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: lpes {{{','.join(VERBS)}}} ...\n\nHelp and examples: lpes VERB --help")
        return 0 if arguments else 2
    if arguments[0] not in VERBS:
        return fail(f"{arguments[0]!r} is not a verb; the verbs are: {', '.join(VERBS)}")
    return import_module(VERBS[arguments[0]]).main(arguments[1:])


def run_verb(defaults: Flags, run: Callable[[Flags], object], manual: str, arguments: Sequence[str], name: str) -> int:
    """Parse `arguments` over the dataclass `defaults` and run the verb with the result; returns the exit code."""
    try:
        run(_parse(defaults, manual, arguments, f"python -m lpes_jax.{name}"))
    except UserError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What stands behind `flag` (`--flag value` or `--flag=value`), the last time it is given."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == flag:
            value = following
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def fail(message: str) -> int:
    """Print the one line of a user's mistake; returns its exit code."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _parse(defaults: Flags, manual: str, arguments: Sequence[str], prog: str) -> Flags:
    # tyro draws its errors as a box; its first paragraph becomes our one line.
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                type(defaults),
                default=defaults,
                prog=prog,
                description=manual,
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│╭╮╰╯─ \n") for line in captured.getvalue().split("────", 2)[-1].splitlines()]
        text = " ".join(re.split(r"\n\s*\n", "\n".join(lines).strip())[0].split())
        raise UserError(f"{text} (see {prog} --help)") from None
