"""The image's entrypoint and its health check."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from tests.docker.compose import FOLDER

ADDRESSES = ["/dns4/bootstrap/tcp/31337/p2p/QmA", "/ip4/203.0.113.7/tcp/31337/p2p/QmA"]
NOBODY, NODE = "/ip4/127.0.0.1/tcp/", "QmYbqG5JzkGCmS7oEvBSUmgRNBFrD1Y5tG3cXcMQSsq2rk"


def entry(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(FOLDER / "entrypoint.sh"), *arguments],
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "program"), [(["--version"], "noloco-peer"), (["bootstrap", "--version"], "noloco-bootstrap")]
)
def test_the_first_word_picks_the_program(arguments: list[str], program: str) -> None:
    said, _ = entry(*arguments).communicate(timeout=60)
    assert said.split()[0] == program


@pytest.fixture
def stub_path(tmp_path: Path) -> str:
    """A PATH with a ``noloco-peer`` that prints its addresses: the real one imports for seconds."""
    (stub := tmp_path / "noloco-peer").write_text('#!/bin/sh\necho "$NOLOCO_INITIAL_PEERS"\n')
    stub.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def wait_for_waiting(process: subprocess.Popen[str]) -> None:
    """Until the shell has begun the first ``sleep`` of its loop."""
    while not psutil.Process(process.pid).children():
        assert process.poll() is None
        time.sleep(0.01)


def test_a_peer_waits_for_the_address_file_and_joins_by_it(stub_path: str, tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    process = entry("train", PATH=stub_path, INITIAL_PEERS_FILE=str(file))
    wait_for_waiting(process)
    file.write_text("\n".join(ADDRESSES) + "\n")
    said, errors = process.communicate()
    assert said.split() == ADDRESSES and said.count("\n") == 1, errors


def test_addresses_from_the_environment_need_no_file(stub_path: str, tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    process = entry("train", PATH=stub_path, INITIAL_PEERS_FILE=none, NOLOCO_INITIAL_PEERS=ADDRESSES[1])
    said, errors = process.communicate()
    assert said.split() == ADDRESSES[1:], errors


@pytest.mark.long
def test_join_takes_its_address_from_the_command_the_environment_or_the_file(tmp_path: Path) -> None:
    """Nobody listens at any of them: the line names the one that was tried."""
    (file := tmp_path / "addresses").write_text(f"{NOBODY}3/p2p/{NODE}\n")
    quick = ["--set", "peer.network.join_timeout=1", "--set", f"run.dir={tmp_path}"]
    for arguments, environment, port in (
        (["join", f"{NOBODY}1/p2p/{NODE}"], {}, 1),
        (["join"], {"NOLOCO_INITIAL_PEERS": f"{NOBODY}2/p2p/{NODE}"}, 2),
        (["join"], {"INITIAL_PEERS_FILE": str(file)}, 3),
    ):
        process = entry(*arguments, *quick, **environment)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1 and f"{NOBODY}{port}/" in errors and "Traceback" not in errors, errors
    process = entry("join")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and errors.startswith("error: join: give an ADDRESS") and errors.count("\n") == 1


def test_waiting_times_out_with_one_line(tmp_path: Path) -> None:
    process = entry("train", INITIAL_PEERS_FILE=str(tmp_path / "none"), INITIAL_PEERS_WAIT="1")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.startswith("error: no addresses in") and errors.count("\n") == 1


def test_waiting_is_stopped_by_sigterm(tmp_path: Path) -> None:
    process = entry("train", INITIAL_PEERS_FILE=str(tmp_path / "none"))
    wait_for_waiting(process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


@contextlib.contextmanager
def serving(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/healthz"
        finally:
            server.shutdown()
            thread.join(5)


def healthy(*urls: str) -> bool:
    command = [sys.executable, "-I", "-S", str(FOLDER / "healthcheck.py"), *urls]
    environment = {"http_proxy": "http://127.0.0.1:9"}  # no proxy is there: the check must not use it
    return subprocess.run(command, env=environment, timeout=30).returncode == 0


def test_healthy_means_an_answer_of_200() -> None:
    absent = "http://127.0.0.1:9/metrics"
    with serving(200) as well, serving(503) as ill:
        assert healthy(well) and healthy(absent, well)
        assert not healthy(ill) and not healthy(absent) and not healthy(absent, ill)
