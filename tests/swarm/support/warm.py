"""Peers that start at once: a warm process, which has loaded the libraries, forks them.

A peer needs eight seconds of a core to load torch, transformers and hivemind. Tests start about three hundred peers, so
most of them are forked here. Each still has its own process, session, signals and exit code. (``cold=True`` in
harness.py starts one as a user does.)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tests.netlab.tun import die_with_parent

ROOT = Path(__file__).parents[3]
LIBRARIES = (
    "peer.training.assemble",
    "peer.commands.local_swarm.swarm",
    "dht_bootstrap.cli",
    "transformers.models.llama.modeling_llama",
)
LOADED = 90.0  # seconds
POLL = 0.02  # seconds
NEWNET = 0x40000000  # CLONE_NEWNET


class Forked:
    """The interface of :class:`subprocess.Popen` for a forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Warm:
    """The client of the warm process. There is one for all tests; it ends with this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.swarm.support.warm"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._forked: dict[int, Forked] = {}
        self._asking = threading.Lock()
        self._answered = threading.Condition()
        self._answer: Forked | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], network: str = "") -> Forked:
        """``python *arguments`` (``-m MODULE ...``), output in ``log``; ``network``: a network namespace's file."""
        assert arguments[0] == "-m" and self._process.stdin is not None
        log.write_bytes(b"")
        order = {"arguments": arguments[1:], "log": str(log), "environment": dict(environment), "network": network}
        with self._asking, self._answered:
            self._answer = None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            assert self._answered.wait_for(lambda: self._answer is not None, LOADED), "the warm process does not answer"
            assert self._answer is not None
            return self._answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._answered:
                if "code" in told:
                    self._forked.pop(told["pid"]).ended(told["code"])
                else:
                    self._answer = self._forked[told["pid"]] = Forked(told["pid"])
                    self._answered.notify_all()


@functools.cache
def warm() -> Warm:
    """The warm process of this test run."""
    return Warm()


# -- the warm process itself


def serve(orders: BinaryIO, answers: BinaryIO) -> dict[str, Any] | None:
    """Fork a child for each order. Returns in the child with its order, and in the parent with ``None`` at the end."""
    children: set[int] = set()
    life, end = os.pipe()  # the children's stdin: it closes when this process ends

    def tell(**words: int) -> None:
        answers.write(json.dumps(words).encode() + b"\n")
        answers.flush()

    while True:
        if select.select([orders], [], [], POLL)[0]:
            line = orders.readline()
            if not line:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if not pid:
                orders.close()
                answers.close()
                os.close(end)
                os.dup2(life, 0)
                order: dict[str, Any] = json.loads(line)
                return order
            children.add(pid)
            tell(pid=pid)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                tell(pid=pid, code=os.waitstatus_to_exitcode(status))


def become(order: dict[str, Any]) -> None:
    """Set this process up like a fresh interpreter, except that it always ends with the tests."""
    die_with_parent(signal.SIGKILL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order["network"] and ctypes.CDLL(None, use_errno=True).setns(os.open(order["network"], os.O_RDONLY), NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {order['network']}")
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    module, *arguments = order["arguments"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Read orders on stdin and write answers on stdout, as lines of JSON."""
    for name in LIBRARIES:
        __import__(name)
    gc.collect()
    gc.freeze()
    order = serve(os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0))
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
