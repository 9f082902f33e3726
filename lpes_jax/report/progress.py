"""Progress of a search: a live line in a terminal, one plain line per generation elsewhere."""

import contextlib
import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from lpes_jax import process
from lpes_jax.report.tables import printable

_EVERY = 15.0  # seconds between plain lines


class SearchProgress:
    """Counts the (individual, prompt) pairs done of `total`; `note` describes the current step. Writes to stderr.

    `deadline`: the latest end, in seconds as in `time.time`; None if all of `total` will be done.
    """

    def __init__(self, total: int, console: Console | None = None, deadline: float | None = None):
        self._deadline = deadline
        self._console = console or Console(file=sys.stderr)
        self._total, self._done, self._note = total, 0, ""
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._open = contextlib.ExitStack()
        self._task = self._bar.add_task("", total=total, rate="")

    def __enter__(self) -> "SearchProgress":
        if self._console.is_terminal:
            self._open.enter_context(process.cleaning(_restore_cursor))
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()
        self._open.close()

    def prompts(self, count: int) -> None:
        """Count more pairs as done."""
        self._done += count
        self._bar.update(self._task, completed=self._done, rate=self._rate())
        if not self._console.is_terminal and time.monotonic() - self._last_line > _EVERY:
            self._line()

    def skip(self, count: int) -> None:
        """Reduce the total by pairs that need no scoring (cached individuals)."""
        self._total -= count
        self._bar.update(self._task, total=self._total)

    def note(self, text: str) -> None:
        """Describe the current step; prints a plain line if there is no terminal."""
        self._note = printable(text)
        self._bar.update(self._task, description=self._note)
        if not self._console.is_terminal:
            self._line()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        with contextlib.suppress(OSError):  # its reader is gone
            self._console.print(Text(f"{self._note}  {self._rate()}  {self._left()}"), soft_wrap=True)

    def _rate(self) -> str:
        return f"{self._done / max(time.monotonic() - self._started, 1e-9):.1f} prompts/s"

    def _left(self) -> str:
        if self._deadline is not None:
            return _minutes(max(0.0, self._deadline - time.time()))
        if not self._done:
            return f"{self._total} prompts to score"
        return _minutes((time.monotonic() - self._started) * (self._total - self._done) / self._done)


def _minutes(seconds: float) -> str:
    return f"about {int(seconds) // 60}:{int(seconds) % 60:02d} left"


def _restore_cursor() -> None:
    """Remove the bar and show the cursor, as rich does at the end of a bar."""
    os.write(2, b"\r\x1b[2K\x1b[?25h")
