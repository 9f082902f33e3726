"""The command line: `lpes VERB ...`, the same as `python -m lpes_jax.VERB ...`.

A verb is a frozen dataclass of flags (tyro makes the parser and the help from it) and a function that takes one. Exit codes:
0 done, 2 the user's mistake (one line `error: ...` on stderr), 1 a fault of ours (a traceback) or the loss of another process
(one line), 130 and 143 ended by SIGINT or SIGTERM (one line that says how to go on). Of several processes (lpes_jax.hosts) all
end with the code of the one that failed. Streams, signals and the environment of a command's own process: lpes_jax.process.
"""

import contextlib
import errno
import io
import itertools
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import jax
import tyro

from lpes_jax import hosts, process
from lpes_jax.compilation import keep_programs
from lpes_jax.errors import Interrupted, UserError
from lpes_jax.limits import check_bounds
from lpes_jax.memory import out_of_memory
from lpes_jax.settings import Settings
from lpes_jax.settings.groups import HostSettings
from lpes_jax.store import output
from lpes_jax.store.files import unwritable
from lpes_jax.store.provenance import DETERMINISTIC

VERBS = {
    "search": "lpes_jax.search.__main__",
    "evaluate": "lpes_jax.evaluate.__main__",
    "compare": "lpes_jax.compare",
    "export": "lpes_jax.export",
    "profile": "lpes_jax.profile.__main__",
    "doctor": "lpes_jax.doctor",
}
Flags = TypeVar("Flags", bound=Settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """`lpes VERB ...`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: lpes {{{','.join(VERBS)}}} ...\n\nHelp and examples: lpes VERB --help")
        return 0 if arguments else 2
    if arguments[0] not in VERBS:
        return fail(f"{arguments[0]!r} is not a verb; the verbs are: {', '.join(VERBS)}")
    return process.ended(import_module(VERBS[arguments[0]]).main(arguments[1:]))


def run_verb(
    defaults: Flags,
    run: Callable[[Flags], object],
    manual: str,
    arguments: Sequence[str],
    name: str,
    *,
    many_hosts: bool = False,
) -> int:
    """Parse `arguments` over the dataclass `defaults` and run the verb with the result; returns the exit code.

    `many_hosts`: the verb runs in several processes where flags name these, and has those flags.
    """
    try:
        with _sigterm():
            flags, host_flags = _parse(defaults, manual, arguments, f"python -m lpes_jax.{name}", many_hosts)
            check_bounds(flags)  # before processes wait for each other
            if flags.flat().get("deterministic"):
                _make_deterministic(arguments)
            hosts.start(host_flags)
            process.check_devices()
            keep_programs()
            with _output_path(flags, arguments) as flags:
                run(flags)
            hosts.finish()
    except UserError as error:
        return fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _fault()
        return fail(str(unwritable(error, error.filename or "the results", "make room, then start again")))
    except jax.errors.JaxRuntimeError as error:
        return full_memory() if out_of_memory(error) else _fault()
    except MemoryError:
        return full_memory()
    except KeyboardInterrupt as stop:
        return hosts.leave(128 + getattr(stop, "number", signal.SIGINT), str(stop) or "interrupted")
    except Exception:
        return _fault()
    finally:
        process.settle()
    return 0


def full_memory() -> int:
    """Say that the memory is full, and what helps; returns the exit code."""
    if jax.default_backend() != "gpu":
        return fail(
            "the memory is full; give smaller numbers (--batch-size, --limit, --population-size), or end what else runs"
        )
    return fail(
        "the device's memory is full; end what else runs there (nvidia-smi lists it), or set "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false to share it"
    )


def _fault() -> int:
    """The exception that is handled is none of the user's: a traceback. Where there are other processes, they end as well."""
    if not hosts.in_company():
        raise
    time.sleep(2)  # what failed may be the talk with a process that is gone: the end comes with that reason, then
    os.write(2, traceback.format_exc().encode())
    return hosts.leave(1, "error: a fault in the program; its traceback is above, or on the stderr of that process")


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What stands behind `flag` (`--flag value` or `--flag=value`), the last time it is given."""
    value = None
    for argument, following in itertools.pairwise([*arguments, None]):
        name, given, rest = (argument or "").partition("=")
        if name.replace("_", "-") == flag:
            value = rest if given else following
    return value


def fail(message: str) -> int:
    """Say the one line of a user's mistake; returns its exit code."""
    return hosts.leave(2, "error: " + process.one_line(message))


@contextlib.contextmanager
def _output_path(flags: Flags, arguments: Sequence[str]) -> Iterator[Flags]:
    """The flags, with a folder of their own where the user names none: a new one, or with --resume the one written to last."""
    of_flags = flags.flat()
    folder: Path | None = of_flags.get("output_path")
    if folder is None or value_of("--output-path", arguments) is not None:
        yield flags
    elif of_flags.get("resume") or of_flags.get("overwrite"):
        chosen = hosts.from_first(lambda: output.latest(folder))
        yield flags.replace(output_path=chosen)
    else:
        with contextlib.ExitStack() as stack:
            chosen = hosts.from_first(lambda: stack.enter_context(output.reserved(folder)))
            yield flags.replace(output_path=chosen)


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


def _make_deterministic(arguments: Sequence[str]) -> None:
    """Give XLA its flag for it, if this process is the verb's own: XLA reads its flags once, when JAX looks for devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags.split() and list(arguments) == sys.argv[len(sys.argv) - len(arguments) :]:
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()


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
