"""The process of a command (`python -m lpes_jax.VERB`, `lpes VERB`): its streams, environment and signals.

`lpes_jax/__init__.py` imports this module first, before JAX. In a command it takes over the process:

- Standard output and standard error survive their readers: a closed pipe, a full disk or a character that the encoding lacks
  (written as `+/-` or `\\xb1`) never ends a command.
- Environment variables of JAX that change what programs compute, or turn warnings into errors, are removed and named on stderr.
  Variables that say where and how to run stay. An environment that cannot work (no working directory, a value that JAX refuses,
  a platform without a device) is reported in one line with exit code 2.
- A thread of its own handles SIGINT and SIGTERM: it ends the process at any moment, with exit code 128 + the signal's number
  and one line. Nothing is raised in the main thread, because an exception that arrives while Python imports or XLA compiles is
  lost, or crashes. Work that must be done before the end is registered with `graceful`, `saying`, `cleaning` and `unbroken`.

A program that imports lpes_jax keeps its own streams, environment and signal handlers, and gets a KeyboardInterrupt.
"""

import atexit
import codecs
import contextlib
import errno
import io
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lpes_jax.errors import Interrupted, UserError

PLAIN = "lpes_jax.plain"  # the error handler of encodings: missing characters become ASCII
_SPELLED = {"±": "+/-", "…": "...", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x"}
# JAX's settings that change results or turn warnings into errors. All others are kept.
_SET_ASIDE = re.compile(
    "JAX_(ENABLE_X64|EXPLICIT_X64_DTYPES|DEFAULT_DTYPE_BITS|NUMPY_(RANK|DTYPE)_PROMOTION|DEBUG_(NANS|INFS|KEY_REUSE)|DISABLE_JIT"
    "|DEFAULT_PRNG_IMPL|ENABLE_CUSTOM_PRNG|LEGACY_PRNG_KEY|THREEFRY_PARTITIONABLE|RANDOM_SEED_OFFSET|DEFAULT_DEVICE"
    "|HIGH_DYNAMIC_RANGE_GUMBEL|TRANSFER_GUARD\\w*|THREAD_GUARD|ARRAY_GARBAGE_COLLECTION_GUARD|CHECK_TRACER_LEAKS"
    "|CHECK_STATIC_INDICES|ENABLE_CHECKS|NO_TRACING|NO_EXECUTION|ERROR_CHECKING_BEHAVIOR_\\w+|ALLOW_F16_REDUCTIONS"
    "|DISALLOW_MESH_CONTEXT_MANAGER|RAISE_PERSISTENT_CACHE_ERRORS)"
)

_HARMLESS = ("", "0", "false", "no", "off", "n", "f", "allow", "standard")  # values that equal the defaults

_WAIT = 10  # seconds between two lines of `waiting`
_STARTED = time.time()

_owned = _ending = False
_busy = threading.RLock()  # the end of the process waits for this lock, and keeps it
_takers: list[Callable[[int], None]] = []
_lines: list[Callable[[], str]] = [lambda: "interrupted"]
_cleanups: list[Callable[[], object]] = []


def is_ours() -> bool:
    """Whether this process is a command of ours, whose streams, environment and signals were taken over."""
    return _owned


def started() -> float:
    """When this command was started, before its imports; in a program that imports lpes_jax, now. As `time.time`."""
    return _STARTED if _owned else time.time()


def take_over() -> None:
    """Make this process a command's, permanently. If the environment cannot work, exit with one line and code 2."""
    global _owned
    _owned = True
    for descriptor in (0, 1, 2):  # otherwise the next file that is opened would get the number of a closed one
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, writer), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)  # the thread handles it at once, not between two bytecodes
    sys.stdout, sys.stderr = _surviving(sys.stdout, 1), _surviving(sys.stderr, 2)
    try:
        _check_environment()
    except UserError as error:
        leave(2, f"error: {error}")


def import_transformers() -> None:
    """In a command: import transformers' tokenizers without torch, which they do not need and which takes seconds.

    For transformers there is no torch in this process from then on.
    """
    if not _owned or sys.modules.keys() & {"torch", "transformers"}:
        return
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # makes every import of it fail
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    finally:
        del sys.modules["torch"]


def import_jax() -> None:
    """Import JAX. Raises UserError if it refuses a setting in the environment."""
    try:
        import jax  # noqa: F401
    except ValueError as error:
        if not any(name.startswith("JAX_") for name in os.environ):
            raise
        raise UserError(f"JAX cannot start with this environment ({one_line(str(error))}); correct or unset that") from error


def check_devices() -> None:
    """Make JAX look for its devices. Raises UserError if it finds none of those that the environment asks for."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError, ValueError, KeyError) as error:
        named = [name for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES") if os.environ.get(name)]
        asked = "".join(f"{name}={os.environ[name]}: " for name in named)
        reason = f" ({one_line(str(error))})" if str(error) else ""
        way_out = f"unset {' and '.join(named)}, or install JAX for that device" if named else "see JAX's own installation page"
        raise UserError(f"{asked}JAX finds no device to run on{reason}; {way_out}") from error


def plain(text: str, encoding: str | None) -> str:
    """The text in the characters of `encoding`: `+/-` in place of a missing `±`, backslash escapes for other characters."""
    return text.encode(encoding or "utf-8", PLAIN).decode(encoding or "utf-8")


def one_line(text: str) -> str:
    """The text as one line; very long words are shortened."""
    return re.sub(r"\S{400,}", lambda word: f"{word[0][:160]}...{word[0][-80:]}", " ".join(text.split()))


@contextlib.contextmanager
def graceful(take: Callable[[int], None]) -> Iterator[None]:
    """In a command: pass the first signal in here to `take` (in another thread); the next signal ends the process."""
    _takers.append(take)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # it was called already
            _takers.remove(take)


@contextlib.contextmanager
def saying(line: Callable[[], str]) -> Iterator[None]:
    """On SIGINT or SIGTERM in here, print this line, which says how to continue; an `Interrupted` gets it as its message."""
    _lines.append(line)
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(getattr(stop, "number", signal.SIGINT), line()) from None
    finally:
        _lines.remove(line)


@contextlib.contextmanager
def cleaning(clean: Callable[[], object]) -> Iterator[None]:
    """In a command: a signal in here calls `clean` before the process ends. Other exits do not call it."""
    _cleanups.append(clean)
    try:
        yield
    finally:
        _cleanups.remove(clean)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """In a command: delay a signal in here until the block is done. `is_ending` tells whether one is waiting."""
    with _busy:
        yield


def is_ending() -> bool:
    """Whether a signal has come that ends this process."""
    return _ending


def settle() -> None:
    """If a signal is about to end this process, wait for it, because its exit code is the one that counts."""
    while _ending:
        time.sleep(1)


def ended(code: int) -> int:
    """Return the exit code for `sys.exit`; a command instead exits here with that code.

    Python's own shutdown takes a second, in which a signal is lost, and crashes if XLA still compiles in a thread.
    """
    if _owned:
        settle()
        if not code:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def leave(code: int, line: str) -> NoReturn:
    """Write a line on stderr and end this process, even if its other threads are busy."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))
    os._exit(code)


_farewell: Callable[[int, str], object] = leave


@contextlib.contextmanager
def waiting(awaited: str) -> Iterator[None]:
    """Print every ten seconds on stderr that this process waits, and for what."""
    over, begun = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(_WAIT):
            with contextlib.suppress(OSError, ValueError):
                print(f"waiting for {awaited}, {time.monotonic() - begun:.0f} s so far", file=sys.stderr, flush=True)

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def set_farewell(farewell: Callable[[int, str], object] = leave) -> None:
    """Set how a signal ends this process: `farewell` gets the exit code and the line, and does not return."""
    global _farewell
    _farewell = farewell


def _watch(reader: socket.socket, writer: socket.socket) -> None:
    """Read the numbers of signals as they arrive. The reference to `writer` keeps it alive."""
    while numbers := reader.recv(64):
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM):
                if _takers:
                    _takers.pop()(number)
                else:
                    _end(number)


def _end(number: int) -> None:
    global _ending
    _ending = True
    _busy.acquire(timeout=20)  # never released: the main thread continues meanwhile, and must not start to write
    for clean in reversed(_cleanups[:]):
        with contextlib.suppress(Exception):
            clean()
    _farewell(128 + number, _lines[-1]())


def _check_environment() -> None:
    """Remove settings of JAX that commands must not use. Raises UserError if there is no working directory."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory is gone ({error.strerror}); change to another folder, then start again"
        ) from error
    aside = {name: os.environ.pop(name) for name in sorted(os.environ) if _SET_ASIDE.fullmatch(name)}
    if told := [f"{name}={value}" for name, value in aside.items() if value.lower() not in _HARMLESS]:
        print(f"note: {', '.join(told)} in the environment is ignored; this command sets what it needs", file=sys.stderr)


class _Surviving(io.RawIOBase):
    """A descriptor that can always be written to; output that can no longer be written is dropped."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if _ending:  # the signal's line is the last one
            return len(data)
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # the parent process made it non-blocking
            select.select([], [self._descriptor], [])
            return 0
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._descriptor)
            if self._descriptor == 1 and error.errno not in (errno.EPIPE, errno.ECONNRESET):
                print(f"note: standard output cannot be written ({error.strerror})", file=sys.stderr)
            return len(data)


def _surviving(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """A new stream over the descriptor, on which no write is an error."""
    raw = _Surviving(descriptor)
    if stream is not None:
        stream.flush()
    by_line = descriptor == 2 or raw.isatty() or getattr(stream, "write_through", False)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, PLAIN, line_buffering=by_line)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SPELLED.get(char) or char.encode("ascii", "backslashreplace").decode() for char in missing), error.end


def _is_command() -> bool:
    """Whether Python was started as `python -m lpes_jax.VERB` (runpy sets argv[0] to -m during imports) or as `lpes`."""
    if sys.argv[:1] == ["-m"]:
        return any(re.fullmatch(r"(-\w*m)?lpes_jax(\.\w+)*", word) for word in sys.orig_argv)
    return os.path.basename("".join(sys.argv[:1])) in ("lpes", "lpes.exe", "lpes-script.py")


codecs.register_error(PLAIN, _spell)
if _is_command():
    take_over()
