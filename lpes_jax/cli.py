"""The command line: `lpes VERB ...`, the same as `python -m lpes_jax.VERB ...`.

A verb is a frozen dataclass of flags (lpes_jax.flags parses them) and a function that takes one. Exit codes: 0 success; 2 a
user error (one line `error: ...` on stderr); 1 a fault of ours (a traceback) or the loss of another process (one line); 130 and
143 ended by SIGINT or SIGTERM (one line that says how to resume). With several processes (lpes_jax.hosts) all end with the code
of the one that failed. lpes_jax.process handles the streams, signals and environment of a command's own process.

Help, and checks that need no model, run before JAX is imported. `lpes_jax.running` imports JAX.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

from lpes_jax import process
from lpes_jax.errors import Interrupted, UserError
from lpes_jax.flags import Parser
from lpes_jax.limits import check_bounds
from lpes_jax.models import weight_hash
from lpes_jax.settings import Settings
from lpes_jax.settings.groups import check_hosts
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
    needs_torch: Callable[[Flags], bool] = lambda flags: False,
) -> int:
    """Parse `arguments` over the dataclass `defaults` and run the verb with the result; returns the exit code.

    `check` raises UserError for flags and files that `run` would refuse; it needs no model and imports no JAX.
    `many_hosts`: the verb has the flags of several processes, and runs in them. `needs_torch`: `run` needs
    transformers with torch.
    """
    try:
        with _sigterm():
            parser = Parser(defaults, f"python -m lpes_jax.{name}", manual, many_hosts)
            if (page := parser.help(arguments)) is not None:
                print(page, end="")
                return 0
            parsed = parser.parse(arguments)
            flags = parsed.flags
            check_bounds(flags)  # before processes wait for each other
            named = "output_path" in flags.flat() and parsed.has("output_path")
            if not check_hosts(parsed.hosts):  # a single failing process would leave the others waiting
                if named:
                    _check_output(flags, name)
                check(flags)
            if "output_path" in flags.flat():  # of a verb whose records identify the model
                weight_hash.begin(str(flags.flat()["model"]))
            process.import_jax()
            if not needs_torch(flags):
                process.import_transformers()
            from lpes_jax import running

            return running.run(flags, parsed.hosts, run, folder_named=named, own=_is_own(arguments))
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return 128 + getattr(stop, "number", signal.SIGINT)
    finally:
        process.settle()


def _fail(message: str) -> int:
    """Print the one line of a user error; returns its exit code."""
    print("error: " + process.one_line(message), file=sys.stderr)
    return 2


def _check_output(flags: Settings, verb: Any) -> None:
    """Raise UserError if `--output-path` cannot be written, or contains another run."""
    values = flags.flat()
    modes = {mode: values.get(mode, False) for mode in ("overwrite", "resume")}
    output.check(values["output_path"], verb, **modes)


def _is_own(arguments: Sequence[str]) -> bool:
    """Whether this process was started as this verb, with these arguments."""
    return list(arguments) == sys.argv[len(sys.argv) - len(arguments) :]


@contextlib.contextmanager
def _sigterm() -> Iterator[None]:
    """Inside this context SIGTERM acts like SIGINT, unless the process is a command's own (lpes_jax.process)."""
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
