"""What ends a process, and in which order."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from peer.process import Signals, Stop

signal.signal(signal.SIGHUP, signal.{before})
signals = Signals(Stop())
signals.looping = True
os.kill(os.getpid(), signal.SIGHUP)
print(signals.stop.requested)
"""


@pytest.mark.parametrize(("before", "asked"), [("SIG_DFL", "True"), ("SIG_IGN", "False")])
def test_a_terminal_that_is_lost_asks_the_loop_to_stop_but_not_under_nohup(before: str, asked: str) -> None:
    """It ended the peer at once, and its last steps were lost."""
    program = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{asked}\n")
