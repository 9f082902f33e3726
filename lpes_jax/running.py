"""Run a verb after its flags are checked: processes, devices, compiled programs, the run folder, and errors.

`lpes_jax.cli` parses and checks without JAX. It imports this module when a verb runs.
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
    """Run a verb with its flags.

    Args:
        flags: The settings of the verb.
        host_flags: The settings of its processes.
        verb: The function to run.
        folder_named: Whether the user gave `--output-path`. If not, a new folder is chosen.
        own: Whether the process belongs to the verb, so that XLA's flags may be set.

    Returns:
        The exit code.
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
    """Print the one line of a user error; returns its exit code."""
    return hosts.leave(2, "error: " + process.one_line(message))


def full_memory() -> int:
    """Print that the memory is full, and the way out; returns the exit code."""
    if jax.default_backend() != "gpu":
        return fail(
            "the memory is full; give smaller numbers (--batch-size, --limit, --population-size), or end other programs"
        )
    return fail(
        "the device's memory is full; end other programs there (nvidia-smi lists them), or set "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false to share it"
    )


def _fault() -> int:
    """Print the traceback of the current exception, which is our fault, and end the other processes too."""
    if not hosts.in_company():
        raise
    time.sleep(2)  # the cause may be a lost connection to another process, which then ends this one with that reason
    os.write(2, traceback.format_exc().encode())
    return hosts.leave(1, "error: a fault in the program; its traceback is above, or on the stderr of that process")


@contextlib.contextmanager
def _output_path(flags: Flags, named: bool) -> Iterator[Flags]:
    """The flags with a run folder. If the user names none: a new one, or with --resume the latest one."""
    settings_by_name = flags.flat()
    folder: Path | None = settings_by_name.get("output_path")
    if folder is None or named:
        yield flags
    elif settings_by_name.get("resume") or settings_by_name.get("overwrite"):
        chosen = hosts.from_first(lambda: output.latest(folder))
        yield flags.replace(output_path=chosen)
    else:
        with contextlib.ExitStack() as stack:
            chosen = hosts.from_first(lambda: stack.enter_context(output.reserved(folder)))
            yield flags.replace(output_path=chosen)


def _make_deterministic() -> None:
    """Set XLA's flag for determinism. XLA reads its flags once, when JAX looks for devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags.split():
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()
