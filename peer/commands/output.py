"""What a command prints, when nobody reads it any more and when the disk that it goes to is full."""

from __future__ import annotations

import os
import select
import sys

from peer.errors import DISK_FULL, RunError, print_error


def tell(line: str, *, flush: bool = True) -> None:
    """Print it. A disk that is full loses the line, and not the work of hours."""
    try:
        print(line, flush=flush)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def is_cut() -> bool:
    """Is stdout a pipe that nobody reads any more?"""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # for errors only
    return bool(pipe.poll(0))


def flushed(code: int) -> int:
    """Write what is still in memory. Returns the exit code of a command that would have had ``code``."""
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # for what Python writes there at its end
            if not isinstance(error, BrokenPipeError):
                code = code or print_error(RunError(f"cannot write the output: {error.strerror}"))
    return code
