"""The early end of a search: by its budget, or by SIGINT or SIGTERM after the current batch is scored and written."""

import contextlib
import os
import signal
import threading
from types import FrameType

from lpes_jax import hosts, process
from lpes_jax.errors import Interrupted


class BudgetSpent(Exception):
    """Raised while individuals are scored, to end the search."""


class GracefulStop:
    """A context manager that delays SIGINT and SIGTERM until `check`, which raises Interrupted. A second signal is not delayed.

    With several processes, a signal to one ends all of them at the same `check`. Only the main thread of a program receives
    signals; in other threads this does nothing. In a command, `process` handles the signals; otherwise handlers set here do.
    """

    def __init__(self):
        self._signal: int | None = None
        self._before = {}
        self._taking = contextlib.ExitStack()

    def __enter__(self) -> "GracefulStop":
        if process.is_ours():
            self._taking.enter_context(process.graceful(self._note))
        elif threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._taking.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived. Call it where a search may end."""
        if number := max(hosts.gather(self._signal or 0)):
            raise Interrupted(number)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self._signal is not None:
            raise Interrupted(number)
        self._signal = number
        os.write(
            2, b"ending when the batch under way is scored and saved; once more to end now\n"
        )  # a print may be in progress
