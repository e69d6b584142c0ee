"""The two errors that end a command. Each prints one line and no traceback."""


class UserError(Exception):
    """Wrong use or configuration (exit code 2). The text says what, where and what to do."""


class RunError(Exception):
    """The run cannot go on (exit code 1). The text says what, where and what to do."""


def first_line(error: Exception, most: int) -> str:
    """The first line of another library's error, at most so many characters; its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]
