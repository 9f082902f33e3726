"""The kinds of failure: a mistake of the user (`UserError`), an interrupt (`Interrupted`); all else is a bug of ours."""

import signal


class UserError(Exception):
    """A mistake of the user. Its message is one line that names the problem and the way out.

    Every verb prints it as `error: <message>` on stderr and exits with 2, without a traceback.
    """


class ArrayError(UserError, ValueError):
    """A UserError that is also a ValueError: a function was given an array that it cannot use."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. Its message is one line that says how to continue.

    Every verb prints it on stderr and exits with 128 + the signal's number.
    """

    def __init__(self, number: int = signal.SIGINT, message: str = "interrupted"):
        super().__init__(message)
        self.number = number
