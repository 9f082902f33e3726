"""A verb at work, once its flags are checked: processes, devices, compiled programs, the folder, and what goes wrong.

`lpes_jax.cli` parses and checks without JAX, and imports this module when there is something to run.
"""

import contextlib
import errno
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from lpes_jax import hosts, process
from lpes_jax.compilation import keep_programs
from lpes_jax.errors import UserError
from lpes_jax.memory import out_of_memory
from lpes_jax.settings import Settings
from lpes_jax.settings.groups import HostSettings
from lpes_jax.store import output
from lpes_jax.store.files import unwritable
from lpes_jax.store.provenance import DETERMINISTIC

Flags = TypeVar("Flags", bound=Settings)


def run(flags: Flags, host_flags: HostSettings, verb: Callable[[Flags], object], *, folder_named: bool, own: bool) -> int:
    """Run a verb with its flags; returns the exit code.

    `folder_named`: the user gave `--output-path`; else the verb gets a folder of its own. `own`: this process is the verb's
    own, so that XLA may be given flags.
    """
    try:
        if own and flags.flat().get("deterministic"):
            _make_deterministic()
        hosts.start(host_flags)
        process.check_devices()
        keep_programs()
        with _output_path(flags, folder_named) as flags:
            verb(flags)
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
    return 0


def fail(message: str) -> int:
    """Say the one line of a user's mistake; returns its exit code."""
    return hosts.leave(2, "error: " + process.one_line(message))


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


@contextlib.contextmanager
def _output_path(flags: Flags, named: bool) -> Iterator[Flags]:
    """The flags, with a folder of their own where the user names none: a new one, or with --resume the one written to last."""
    of_flags = flags.flat()
    folder: Path | None = of_flags.get("output_path")
    if folder is None or named:
        yield flags
    elif of_flags.get("resume") or of_flags.get("overwrite"):
        chosen = hosts.from_first(lambda: output.latest(folder))
        yield flags.replace(output_path=chosen)
    else:
        with contextlib.ExitStack() as stack:
            chosen = hosts.from_first(lambda: stack.enter_context(output.reserved(folder)))
            yield flags.replace(output_path=chosen)


def _make_deterministic() -> None:
    """Give XLA its flag for it: XLA reads its flags once, when JAX looks for devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags.split():
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()
