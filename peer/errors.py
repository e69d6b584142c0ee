"""How a command ends: errors that print one line and no traceback, exit codes, an output that cannot be written."""

import errno
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress

from peer import logs

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a network says that fails, and a mounted file server that is away: NFS, sshfs, gcsfuse.
UNREACHED = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNRESET}
UNREACHED |= {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
UNREACHED |= {getattr(errno, "EREMOTEIO", errno.EIO)}  # of Linux alone


class UserError(Exception):
    """Wrong use or configuration (exit code 2). The text says what, where and what to do."""


class RunError(Exception):
    """The run cannot go on (exit code 1). The text says what, where and what to do."""


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """Run ``command``, whose log lines have ``name``; returns its exit code, 0 when it is done or was asked to stop."""
    logs.quiet_libraries()
    try:
        logs.setup(name)
        code = command() or 0
    except (UserError, RunError, PermissionError) as error:
        code = print_error(error)
    except KeyboardInterrupt:
        code = 0
    except BrokenPipeError:
        if not _is_cut():
            raise
        code = 1
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        code = print_error(RunError(f"cannot write {error.filename or 'the output'}: {error.strerror}"))
    return _flushed(code)


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


def of_disk(where: str, error: Exception, advice: str = "") -> UserError | RunError:
    """What to raise of a file or folder that cannot be written or read, also of a library's own error without a number.
    There may be room on a full disk later, and a file server may come back.
    """
    number, said = getattr(error, "errno", None), getattr(error, "strerror", None) or one_line(error, 200)
    where = f"{where}: {' '.join(said.split())}"
    if number in DISK_FULL:
        return RunError(f"{where}; free some space")
    return RunError(f"{where}; start again to go on") if number in UNREACHED else UserError(f"{where}{advice}")


def one_line(error: BaseException, most: int | None = None) -> str:
    """The text of an error in one printable line, at most ``most`` characters of it; its type if it has no text."""
    return logs.printable(" ".join(str(error).split()))[:most] or type(error).__name__


def tell(line: str, *, flush: bool = True) -> None:
    """Print it. A disk that is full loses the line, and not the work of hours."""
    try:
        print(line, flush=flush)  # noqa: T201 - for a command
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def _is_cut() -> bool:
    """Is stdout a pipe that nobody reads any more?"""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # for errors only
    return bool(pipe.poll(0))


def _flushed(code: int) -> int:
    """Write what is still in memory. Returns the exit code of a command that would have had ``code``."""
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # for what Python writes there at its end
            if not isinstance(error, BrokenPipeError):
                code = code or print_error(RunError(f"cannot write the output: {error.strerror}"))
    return code
