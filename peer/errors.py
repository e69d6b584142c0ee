"""The two errors that end a command. Each prints one line and no traceback."""

import errno
import sys
from contextlib import suppress

from peer.logs import printable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class UserError(Exception):
    """Wrong use or configuration (exit code 2). The text says what, where and what to do."""


class RunError(Exception):
    """The run cannot go on (exit code 1). The text says what, where and what to do."""


def print_error(error: UserError | RunError | PermissionError) -> int:
    """What a command says of its end on stderr; returns its exit code. Raises again what is denied and is no file."""
    if isinstance(error, PermissionError):
        if error.filename is None:
            raise error
        error = of_file(error)
    with suppress(OSError):  # nobody reads it any more
        if sys.stderr is not None:  # it was closed (2>&-)
            sys.stderr.write(f"error: {one_line(error)}\n")
    return 2 if isinstance(error, UserError) else 1


def of_file(error: OSError) -> UserError:
    """What to tell of a file or folder that this user may not read or enter."""
    return UserError(f"{error.filename}: {error.strerror}; check its owner and permissions, and of the folders above")


def one_line(error: BaseException, most: int | None = None) -> str:
    """The text of an error in one printable line, at most ``most`` characters of it; its type if it has no text."""
    return printable(" ".join(str(error).split()))[:most] or type(error).__name__
