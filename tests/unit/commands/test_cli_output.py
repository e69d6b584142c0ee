"""What a command does when its output is not read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
from peer.commands import cli

def told(args):
    print("x" * {size})
    return 0

def other_pipe(args):
    raise BrokenPipeError("a socket")

cli._show_config = {command}
cli.main(["show-config", "--config", "x"])
"""


def ended(command: str, size: int = 0, *, unbuffered: bool = False, read: bool = False) -> tuple[int, str]:
    """Exit code and stderr of a command that prints ``size`` characters."""
    reader, output = os.pipe()
    if not read:
        os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    program = [sys.executable, "-c", PROGRAM.format(size=size, command=command)]
    done = subprocess.run(
        program, stdout=output, stderr=subprocess.PIPE, env=environment, text=True, timeout=60, check=False
    )
    os.close(output)
    if read:
        os.close(reader)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", [False, True])
def test_output_that_nobody_reads_any_more_ends_a_command_quietly(unbuffered: bool) -> None:
    """``noloco-peer show-config | head -1`` ended in a traceback."""
    assert ended("told", 10**6, unbuffered=unbuffered) == (1, "")
    assert ended("told", 10, unbuffered=unbuffered) == (1 if unbuffered else 0, "")


def test_another_pipe_that_breaks_is_still_an_error() -> None:
    code, said = ended("other_pipe", read=True)
    assert code == 1 and said.endswith("BrokenPipeError: a socket\n")
