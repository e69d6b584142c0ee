"""The p2p daemon as a child process: what it is given, and its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from peer.p2p.daemon import Daemon


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("GOMEMLIMIT", "1GiB")
    running = Daemon(identity=None, addresses=["/ip4/127.0.0.1/tcp/0"])
    yield running
    running.stop()


def test_it_knows_nothing_of_the_peer_s_environment_but_what_it_needs(daemon: Daemon) -> None:
    given = psutil.Process(daemon.pid).environ()
    assert given.keys() <= {"PATH", "HOME", "TMPDIR", "GOMEMLIMIT", "GOLOG_LOG_LEVEL"}
    assert given["PATH"] == os.environ["PATH"] and given["GOMEMLIMIT"] == "1GiB"


def test_one_that_is_killed_and_not_gone_in_time_is_no_error(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that stands still for a moment."""
    waited: list[float] = []

    def frozen(self: object, timeout: float) -> int:
        waited.append(timeout)
        raise subprocess.TimeoutExpired("p2pd", timeout)

    process = psutil.Process(daemon.pid)
    process.suspend()  # it does not hear SIGTERM
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", frozen)
        daemon.stop(timeout=0.1)
    assert waited == [0.1, 0.1] and not Path(daemon.sockets).exists()
    psutil.wait_procs([process], timeout=30)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
