"""The two errors that end a command. Each prints one line and no traceback."""


class UserError(Exception):
    """Wrong use or configuration (exit code 2). The text says what, where and what to do."""


class RunError(Exception):
    """The run cannot go on (exit code 1). The text says what, where and what to do."""
