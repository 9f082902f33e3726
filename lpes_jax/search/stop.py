"""What ends a search early: its budget, or SIGINT and SIGTERM, with what is being scored finished and written first."""

import contextlib
import os
import signal
import threading
from types import FrameType

from lpes_jax import hosts, process
from lpes_jax.errors import Interrupted


class BudgetSpent(Exception):
    """Raised by what scores individuals to end the search."""


class GracefulStop:
    """While it is entered, a SIGINT or SIGTERM waits until `check`, which raises Interrupted; a second one does not wait.

    Of several processes, a signal to one ends all, at the same `check`. Only a program's main thread can have signals; in
    another, this does nothing. A command has its signals from `process`, a program from handlers that are set here.
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
        """A place where a search may end."""
        if number := max(hosts.gather(self._signal or 0)):
            raise Interrupted(number)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self._signal is not None:
            raise Interrupted(number)
        self._signal = number
        os.write(2, b"ending when the batch under way is scored and saved; once more to end now\n")  # print may be at work
