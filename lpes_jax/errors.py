"""The two kinds of failure: the user's mistake (`UserError`) and everything else (a bug of ours)."""


class UserError(Exception):
    """The user's mistake. Its message is one line that names the thing and the way out.

    Every verb prints it as `error: <message>` on stderr and exits with 2, without a traceback.
    """
