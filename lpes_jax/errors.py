"""The two kinds of failure: the user's mistake (`UserError`) and everything else (a bug of ours); and the user's will."""

import signal


class UserError(Exception):
    """The user's mistake. Its message is one line that names the thing and the way out.

    Every verb prints it as `error: <message>` on stderr and exits with 2, without a traceback.
    """


class ArrayError(UserError, ValueError):
    """A UserError that is a ValueError too: an array that a function cannot take."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. Its message is one line that says how to go on.

    Every verb prints it on stderr and exits with 128 + the signal's number.
    """

    def __init__(self, number: int = signal.SIGINT, message: str = "interrupted"):
        super().__init__(message)
        self.number = number
