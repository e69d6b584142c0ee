"""Builds the image and trains on two machines, each with a Docker engine. It takes minutes: make image-test.

The machines are hosts of the network laboratory. Each has a Docker engine in its network namespace, with a bridge,
address translation and published ports. So containers on different machines reach each other only by the ports and
addresses that the compose files publish and announce. Needs root and Debian's docker.io, docker-compose and
debootstrap. BASE=python:3.12-slim-bookworm in the environment takes that base from its registry.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peer.commands.local_swarm.tail import Tail
from tests.docker.build import IMAGE, build
from tests.docker.engine import Engine, missing
from tests.netlab.lab import Lab
from tests.netlab.plan import load

pytestmark = [pytest.mark.image, pytest.mark.timeout(3000)]
STEPS = "--set run.steps=100000 --set run.inner_steps=5"  # more steps than the test waits for, in short phases
READY = 240.0  # seconds, on a loaded machine
PORTS = (31337, 31338, 31339, 9400, 9464)
RUN = ("train", "--config", "/configs/demo.yaml", *STEPS.split(), "--set", "peer.threads=1")


@dataclass
class Machines:
    """``first`` has the bootstrap node and a peer, ``second`` a peer."""

    lab: Lab
    first: Engine
    second: Engine

    def compose_first(self, *arguments: str) -> str:
        given = {"BOOTSTRAP_ANNOUNCE": f"/ip4/{self.lab.address(0)}/tcp/31337", "PEER_ARGS": STEPS}
        return self.first.compose("compose.yaml", arguments, given).stdout

    def compose_second(self, initial_peers: str, *arguments: str) -> str:
        given = {"NOLOCO_INITIAL_PEERS": initial_peers, "PEER_ANNOUNCE": f"/ip4/{self.lab.address(1)}/tcp/31338"}
        given |= {"PEER_ARGS": STEPS, "THREADS": "1", "NOLOCO_PEER_NAME": "far"}
        return self.second.compose("compose.peer.yaml", arguments, given).stdout


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    if missing():
        pytest.fail(missing())
    with ExitStack() as stack:
        builder = stack.enter_context(Engine())
        build(builder)
        data = builder.stop()
        lab = stack.enter_context(Lab(load("lan"), 2))
        engines = [stack.enter_context(Engine(lab.namespace(host), data)) for host in range(2)]
        yield Machines(lab, *engines)


def wait_for(look: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def inspect(engine: Engine, container: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(engine.docker("inspect", container).stdout)
    return found[0]


def container(engine: Engine, service: str) -> str:
    """The id of a service's container, running or not."""
    label = f"label=com.docker.compose.service={service}"
    (found,) = engine.docker("ps", "--all", "--quiet", "--filter", label).stdout.split()
    return found


def test_the_image_holds_no_secrets_caches_compilers_or_tests(machines: Machines) -> None:
    docker = machines.first.docker
    config = inspect(machines.first, IMAGE)["Config"]
    assert (config["User"], config["StopSignal"], config["Volumes"]) == ("1000:1000", "SIGTERM", {"/data": {}})
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE).stdout
    assert "127.0.0.1" not in history and "index" not in history.replace("--no-index", "")
    unwanted = "-name .git -o -name pip.conf -o -name '*.key' -o -name .cache -o -name cc1 -o -path /opt/noloco/tests"
    look = f"find / -xdev \\( {unwanted} \\) -print 2>/dev/null; id -u; noloco-bootstrap --version"
    said = docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", look).stdout
    assert said.splitlines() == ["1000", "noloco-bootstrap 0.2.0"]


def test_a_user_error_is_one_line(machines: Machines, tmp_path: Path) -> None:
    docker = machines.first.docker
    absent = docker("run", "--rm", IMAGE, "train", "--config", "/none.yaml", check=False)
    assert absent.returncode == 2 and absent.stderr.count("\n") == 1 and "/none.yaml" in absent.stderr
    closed = docker("run", "--rm", "--volume", f"{tmp_path}:/data", IMAGE, *RUN, check=False)
    assert closed.returncode == 2 and "cannot write" in closed.stderr.splitlines()[-1]
    assert "Traceback" not in closed.stderr


def test_python_is_process_one_and_receives_sigterm(machines: Machines) -> None:
    docker = machines.first.docker
    docker("run", "--detach", "--name", "alone", "--network", "none", "--read-only", "--tmpfs", "/tmp", IMAGE, *RUN)
    wait_for(lambda: "ready:" in docker("logs", "alone").stderr, READY, "the peer was not ready")
    first = docker("exec", "alone", "cat", "/proc/1/cmdline").stdout
    assert "python" in first and "noloco-peer" in first
    began = time.monotonic()
    docker("stop", "--time", "60", "alone", timeout=90)
    found = inspect(machines.first, "alone")
    assert found["State"]["ExitCode"] == 0 and time.monotonic() - began < 45, docker("logs", "alone").stderr
    folder = Path(found["Mounts"][0]["Source"])
    assert list(folder.glob("*/checkpoints/step_*")) and list(folder.glob("*/identity.key"))
    docker("rm", "--volumes", "alone")


def test_two_machines_train_together_and_come_back(machines: Machines) -> None:
    one, two = machines.first, machines.second
    machines.compose_first("--profile", "cpu", "up", "-d", "--no-build", "--scale", "peer=1", "bootstrap", "peer")
    addresses = machines.compose_first("exec", "-T", "bootstrap", "cat", "/swarm/addresses").split()
    address = next(it for it in addresses if machines.lab.address(0) in it)
    machines.compose_second(address, "--profile", "cpu", "up", "-d", "--no-build", "peer")
    folders = {"peer-1": one.volume("noloco_peers") / "peer-1", "far": two.volume("noloco-peer_peer") / "far"}
    engines = {"peer-1": one, "far": two}
    try:
        wait_for(lambda: all(merges(folder) >= 2 for folder in folders.values()), READY, "they did not merge")
        for engine, service in ((one, "bootstrap"), (one, "peer"), (two, "peer")):
            wait_for(partial(healthy, engine, container(engine, service)), 60, f"{service} is not healthy")
        assert [port for port in PORTS if reaches(machines.lab, 0, 1, port)] == [31338, 31339]
        assert [port for port in PORTS if reaches(machines.lab, 1, 0, port)] == [31337]
        keys = {name: (folder / "identity.key").read_bytes() for name, folder in folders.items()}
        leave(machines, address, folders)
        machines.compose_first("--profile", "cpu", "up", "-d", "--no-build", "--scale", "peer=1", "peer")
        machines.compose_second(address, "--profile", "cpu", "up", "-d", "--no-build", "peer")
        before = {name: merges(folder) for name, folder in folders.items()}
        wait_for(lambda: all(merges(it) > before[name] for name, it in folders.items()), READY, "not again")
        for name, folder in folders.items():
            assert (folder / "identity.key").read_bytes() == keys[name]
            assert "resumed: " in (folder / "peer.log").read_text()
        leave(machines, address, folders)
    except AssertionError as error:
        said = [engine.docker("logs", "--tail", "30", container(engine, "peer")).stderr for engine in engines.values()]
        raise AssertionError("\n".join([str(error), *said])) from error
    machines.compose_first("--profile", "cpu", "down")
    machines.compose_second(address, "--profile", "cpu", "down")
    assert not one.docker("ps", "--all", "--quiet").stdout + two.docker("ps", "--all", "--quiet").stdout


def test_a_container_joins_by_an_address_alone(machines: Machines) -> None:
    """Without a published port, as the member of compose.yaml: they meet through the bootstrap node's relay."""
    machines.compose_first("--profile", "cpu", "up", "-d", "--no-build", "--scale", "peer=1", "bootstrap", "peer")
    addresses = machines.compose_first("exec", "-T", "bootstrap", "cat", "/swarm/addresses").split()
    address = next(it for it in addresses if machines.lab.address(0) in it)
    docker, folder = machines.second.docker, machines.second.volume("joined") / "far"
    own = ("peer.threads=1", "peer.name=far")
    options = ("--detach", "--name", "joined", "--volume", "joined:/data")
    try:
        wait_for(lambda: "ready:" in docker_log(machines.first, container(machines.first, "peer")), READY, "no peer")
        docker("run", *options, IMAGE, "join", address, *(word for it in own for word in ("--set", it)))
        wait_for(lambda: folder.is_dir() and merges(folder) >= 2, READY, "it did not merge")
        said = docker("logs", "joined")
        assert "demo: the configuration " in said.stdout and "of 1 of 1 members" in said.stdout, said.stdout
        docker("stop", "--time", "60", "joined", timeout=90)
        assert inspect(machines.second, "joined")["State"]["ExitCode"] == 0
    except AssertionError as error:
        raise AssertionError(f"{error}\n{docker_log(machines.second, 'joined')[-3000:]}") from error
    docker("rm", "--volumes", "joined")
    machines.compose_first("--profile", "cpu", "down")


def docker_log(engine: Engine, name: str) -> str:
    """What the container has said, the program's lines before its log."""
    said = engine.docker("logs", name, check=False)
    return said.stdout + said.stderr


def reaches(lab: Lab, source: int, target: int, port: int) -> bool:
    """Can one machine connect to a port of the other?"""
    program = f"import socket; socket.create_connection(('{lab.address(target)}', {port}), 5).close()"
    return not subprocess.run(
        lab.command(source, [sys.executable, "-c", program]), stderr=subprocess.DEVNULL, timeout=30
    ).returncode


def merges(folder: Path) -> int:
    """The number of rounds merged with the other machine's peer."""
    other = {"peer-1": "far", "far": "peer-1"}[folder.name]
    tail = Tail(folder.name, folder)
    tail.poll()
    return tail.partners[other]


def healthy(engine: Engine, name: str) -> bool:
    return bool(inspect(engine, name)["State"]["Health"]["Status"] == "healthy")


def leave(machines: Machines, address: str, folders: dict[str, Path]) -> None:
    """SIGTERM stops both together: exit 0, a checkpoint each, all files owned by uid 1000."""
    machines.compose_first("--profile", "cpu", "stop", "peer")
    machines.compose_second(address, "--profile", "cpu", "stop")
    for engine, name in ((machines.first, "peer-1"), (machines.second, "far")):
        state = inspect(engine, container(engine, "peer"))["State"]
        assert state["ExitCode"] == 0 and not state["Running"], state
        assert list((folders[name] / "checkpoints").iterdir())
        owners = {path.stat().st_uid for path in folders[name].rglob("*")}
        assert owners == {1000}
