"""What a command does when its output is not read or is closed, and when a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from peer.commands import cli

def told(args):
    print("x" * {size})
    return 0

def other_pipe(args):
    raise BrokenPipeError("a socket")

def refused(args):
    raise cli.UserError("no")

def waits(args):
    try:
        print("begun", flush=True)
        sys.stdin.readline()
        print("told", flush=True)
        sys.stdin.readline()
    finally:
        print("tidied", flush=True)

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


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "size", "code", "said"),
    [
        ("told", 10, 1, "cannot write the output: No space left on device"),
        ("told", 10**6, 1, "cannot write the output: No space left on device"),
        ("refused", 0, 2, "no"),
    ],
)
def test_output_that_a_full_disk_takes_no_more_is_a_line(
    command: str, size: int, code: int, said: str, unbuffered: str
) -> None:
    """It ended in a traceback."""
    program = [sys.executable, "-c", PROGRAM.format(size=size, command=command)]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            program,
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (code, f"error: {said}\n")


@pytest.mark.parametrize(("command", "code"), [("told", 0), ("refused", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_that_is_closed_changes_nothing_else(command: str, code: int, closed: str) -> None:
    """It ended in a traceback about None, and its exit code was 1."""
    program = ["sh", "-c", f'exec "$@" {closed}', "-", sys.executable, "-c", PROGRAM.format(size=3, command=command)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == ("xxx\n" if command == "told" and closed == "2>&-" else "")
    assert done.stderr == ("error: no\n" if command == "refused" and closed == ">&-" else "")


def test_errors_that_nobody_reads_any_more_change_no_exit_code() -> None:
    reader, output = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", PROGRAM.format(size=0, command="refused")]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=output, text=True, timeout=60, check=False)
    os.close(output)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_tidies_up(number: signal.Signals) -> None:
    """``status`` left a private key and a p2p daemon behind."""
    assert ended_by(number) == (["begun", "tidied"], 0)


def test_nohup_keeps_a_command_alive() -> None:
    assert ended_by(signal.SIGHUP, "trap '' HUP; ", "on\n") == (["begun", "told", "tidied"], 0)


def ended_by(number: signal.Signals, before: str = "", said: str = "") -> tuple[list[str], int]:
    """Lines and exit code of a command that waits, gets a signal, and then reads ``said``."""
    program = ["sh", "-c", f'{before}exec "$@"', "-", sys.executable, "-c", PROGRAM.format(size=0, command="waits")]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    lines = [process.stdout.readline()]
    process.send_signal(number)
    if said:
        process.stdin.write(said)
        process.stdin.flush()
        lines.append(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    return [it.strip() for it in [*lines, *rest.splitlines()]], process.returncode
