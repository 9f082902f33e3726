"""The command line: `lpes VERB ...`, the same as `python -m lpes_jax.VERB ...`.

A verb is a frozen dataclass of flags (tyro makes the parser and the help from it) and a function that takes one. Exit codes:
0 done, 2 the user's mistake (one line `error: ...` on stderr), 1 a fault of ours (a traceback) or the loss of another process
(one line), 130 and 143 ended by SIGINT or SIGTERM (one line that says how to go on). Of several processes (lpes_jax.hosts) all
end with the code of the one that failed. Streams, signals and the environment of a command's own process: lpes_jax.process.

Help, and what is refused without a model, come before JAX is imported; `lpes_jax.running` is the part that has it.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import tyro

from lpes_jax import process
from lpes_jax.errors import Interrupted, UserError
from lpes_jax.limits import check_bounds
from lpes_jax.settings import Settings
from lpes_jax.settings.groups import HostSettings, check_hosts
from lpes_jax.store import output

VERBS = {
    "search": "lpes_jax.search.__main__",
    "evaluate": "lpes_jax.evaluate.__main__",
    "compare": "lpes_jax.compare.__main__",
    "export": "lpes_jax.export.__main__",
    "profile": "lpes_jax.profile.__main__",
    "doctor": "lpes_jax.doctor.__main__",
}
Flags = TypeVar("Flags", bound=Settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """`lpes VERB ...`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: lpes {{{','.join(VERBS)}}} ...\n\nHelp and examples: lpes VERB --help")
        return 0 if arguments else 2
    if arguments[0] not in VERBS:
        return _fail(f"{arguments[0]!r} is not a verb; the verbs are: {', '.join(VERBS)}")
    return process.ended(import_module(VERBS[arguments[0]]).main(arguments[1:]))


def run_verb(
    defaults: Flags,
    run: Callable[[Flags], object],
    manual: str,
    arguments: Sequence[str],
    name: str,
    *,
    check: Callable[[Flags], object] = check_bounds,
    many_hosts: bool = False,
) -> int:
    """Parse `arguments` over the dataclass `defaults` and run the verb with the result; returns the exit code.

    `check` raises UserError for flags and files that `run` would refuse; it needs no model and imports no JAX.
    `many_hosts`: the verb runs in several processes where flags name these, and has those flags.
    """
    try:
        with _sigterm():
            flags, host_flags = _parse(defaults, manual, arguments, f"python -m lpes_jax.{name}", many_hosts)
            check_bounds(flags)  # before processes wait for each other
            named = value_of("--output-path", arguments) is not None
            if not check_hosts(host_flags):  # of several processes one that fails alone would let the others wait
                check(flags)
                if named:
                    _check_output(flags, name)
            process.import_jax()
            from lpes_jax import running

            return running.run(flags, host_flags, run, folder_named=named, own=_is_own(arguments))
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return 128 + getattr(stop, "number", signal.SIGINT)
    finally:
        process.settle()


def _fail(message: str) -> int:
    """Say the one line of a user's mistake; returns its exit code."""
    print("error: " + process.one_line(message), file=sys.stderr)
    return 2


def _check_output(flags: Settings, verb: Any) -> None:
    """Raise UserError where `--output-path` cannot be written, or holds another run."""
    values = flags.flat()
    if "output_path" in values:
        modes = {mode: values.get(mode, False) for mode in ("overwrite", "resume")}
        output.check(values["output_path"], verb, **modes)


def _is_own(arguments: Sequence[str]) -> bool:
    """Is this process the verb's own, started with these arguments?"""
    return list(arguments) == sys.argv[len(sys.argv) - len(arguments) :]


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What stands behind `flag` (`--flag value` or `--flag=value`), the last time it is given."""
    value = None
    for argument, following in pairwise([*arguments, None]):
        name, given, rest = (argument or "").partition("=")
        if name.replace("_", "-") == flag:
            value = rest if given else following
    return value


@contextlib.contextmanager
def _sigterm() -> Iterator[None]:
    """SIGTERM ends what is in here as SIGINT does, where this is no command's own process (lpes_jax.process)."""
    if process.is_ours() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _columns(count: int) -> Iterator[None]:
    """So many columns has the terminal in here."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _parse(defaults: Flags, manual: str, arguments: Sequence[str], prog: str, many_hosts: bool) -> tuple[Flags, HostSettings]:
    """Raises UserError for flags that cannot be."""
    parser: dict[str, Any] = {"prog": prog, "description": manual, "args": list(arguments)}
    parser["config"] = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    verb, of_hosts = tyro.conf.arg(name=""), tyro.conf.arg(name="many-hosts")

    def parse() -> tuple[Flags, HostSettings]:
        if not many_hosts:
            return tyro.cli(type(defaults), default=defaults, **parser), HostSettings()
        both = tuple[Annotated[type(defaults), verb], Annotated[HostSettings, of_hosts]]
        return tyro.cli(both, default=(defaults, HostSettings()), **parser)

    # tyro draws its errors as a box; its first paragraph becomes our one line. No terminal, so no colours, and it never wraps.
    box, nowhere = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(nowhere), _columns(100_000):
            parsed = parse()
    except SystemExit as stop:
        if stop.code:
            lines = [line.strip("│╭╮╰╯─ \n") for line in box.getvalue().split("────", 2)[-1].splitlines()]
            text = " ".join(re.split(r"\n\s*\n", "\n".join(lines).strip())[0].split())
            raise UserError(f"{text} (see {prog} --help)") from None
        parsed = None
    if parsed is None:
        with _columns(max(40, shutil.get_terminal_size().columns)):  # with very few tyro finds no end
            return parse()  # once more, for the terminal: prints the help, and ends
    _check_paths(parsed[0], arguments)
    return parsed


def _check_paths(flags: Settings, arguments: Sequence[str]) -> None:
    """Raise UserError for a flag's path that is empty (Python takes that for the working directory) or longer than can be."""
    for name, path in flags.flat().items():
        flag = "--" + name.replace("_", "-")
        if not isinstance(path, Path):
            continue
        if value_of(flag, arguments) == "":
            raise UserError(f"{flag}: give a path, not an empty text")
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UserError(f"{flag} {str(path):.60}...: {error.strerror}; give another path") from error
