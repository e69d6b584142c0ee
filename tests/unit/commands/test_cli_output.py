"""What a command of either program does when its output is not read or is closed, and when a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import sys
from {package} import cli

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

cli.{function} = {command}
cli.main({arguments})
"""
PROGRAMS = {
    "noloco-peer": ("peer.commands", "_show_config", ["show-config", "--config", "x"]),
    "noloco-bootstrap": ("dht_bootstrap", "_invite", ["invite", "x", "--owner", "y"]),
}
Program = Callable[..., list[str]]  # the words that start it, with what its command does and how much it prints


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    package, function, arguments = PROGRAMS[request.param]

    def words(command: str, size: int = 0) -> list[str]:
        text = PROGRAM.format(package=package, function=function, arguments=arguments, command=command, size=size)
        return [sys.executable, "-c", text]

    return words


def ended(
    program: Program, command: str, size: int = 0, *, unbuffered: bool = False, read: bool = False
) -> tuple[int, str]:
    """Exit code and stderr of a command that prints ``size`` characters."""
    reader, output = os.pipe()
    if not read:
        os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    words = program(command, size)
    done = subprocess.run(
        words, stdout=output, stderr=subprocess.PIPE, env=environment, text=True, timeout=60, check=False
    )
    os.close(output)
    if read:
        os.close(reader)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", [False, True])
def test_output_that_nobody_reads_any_more_ends_a_command_quietly(program: Program, unbuffered: bool) -> None:
    """``noloco-peer show-config | head -1`` ended in a traceback."""
    assert ended(program, "told", 10**6, unbuffered=unbuffered) == (1, "")
    assert ended(program, "told", 10, unbuffered=unbuffered) == (1 if unbuffered else 0, "")


def test_another_pipe_that_breaks_is_still_an_error(program: Program) -> None:
    code, said = ended(program, "other_pipe", read=True)
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
    program: Program, command: str, size: int, code: int, said: str, unbuffered: str
) -> None:
    """It ended in a traceback."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            program(command, size),
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
def test_output_that_is_closed_changes_nothing_else(program: Program, command: str, code: int, closed: str) -> None:
    """It ended in a traceback about None, and its exit code was 1."""
    words = ["sh", "-c", f'exec "$@" {closed}', "-", *program(command, 3)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == ("xxx\n" if command == "told" and closed == "2>&-" else "")
    assert done.stderr == ("error: no\n" if command == "refused" and closed == ">&-" else "")


def test_errors_that_nobody_reads_any_more_change_no_exit_code(program: Program) -> None:
    reader, output = os.pipe()
    os.close(reader)
    words = program("refused")
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=output, text=True, timeout=60, check=False)
    os.close(output)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_tidies_up(program: Program, number: signal.Signals) -> None:
    """``status`` left a private key and a p2p daemon behind."""
    assert ended_by(program, number) == (["begun", "tidied"], 0)


def test_nohup_keeps_a_command_alive(program: Program) -> None:
    assert ended_by(program, signal.SIGHUP, "trap '' HUP; ", "on\n") == (["begun", "told", "tidied"], 0)


def ended_by(program: Program, number: signal.Signals, before: str = "", said: str = "") -> tuple[list[str], int]:
    """Lines and exit code of a command that waits, gets a signal, and then reads ``said``."""
    words = ["sh", "-c", f'{before}exec "$@"', "-", *program("waits")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
