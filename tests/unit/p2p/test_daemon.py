"""The p2p daemon as a child process: what it is given, and its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from peer.errors import UserError
from peer.p2p.daemon import HUNG_SECONDS, LINGERING, LONGEST_SOCKET, SOCKET_NAME, Daemon, folder_prefix
from peer.p2p.greeting import guest_node, guest_settings
from peer.p2p.node import RPC_TIMEOUT, Node
from peer.p2p.reachability.decide import Reachability
from peer.p2p.settings import NodeSettings
from tests.unit.p2p.reachability.test_dialback import listening_port


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("GOMEMLIMIT", "1GiB")
    running = Daemon(identity=None, address="/ip4/127.0.0.1/tcp/0")
    yield running
    running.stop()


def test_it_knows_nothing_of_the_peer_s_environment_but_what_it_needs(daemon: Daemon) -> None:
    given = psutil.Process(daemon.pid).environ()
    assert given.keys() <= {"PATH", "HOME", "TMPDIR", "GOMEMLIMIT", "GOLOG_LOG_LEVEL"}
    assert given["PATH"] == os.environ["PATH"] and given["GOMEMLIMIT"] == "1GiB"


def test_a_port_that_another_daemon_holds_is_not_shared(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both listened there, and the kernel spread the calls over them."""
    looks: list[float] = []
    monkeypatch.setattr("peer.p2p.daemon.clock.sleep", looks.append)
    monkeypatch.setattr("peer.p2p.daemon.clock.monotonic", lambda: sum(looks))
    address = f"/ip4/127.0.0.1/tcp/{listening_port(daemon.pid)}"
    with pytest.raises(UserError, match=f"^port occupied: cannot listen on {address}; choose another port"):
        Daemon(identity=None, address=address)
    assert sum(looks) == pytest.approx(LINGERING)


def test_a_daemon_that_ends_after_its_killed_peer_keeps_the_port_from_nobody(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.p2p.daemon.clock.sleep", lambda _: daemon.stop(timeout=30))
    address = f"/ip4/127.0.0.1/tcp/{listening_port(daemon.pid)}"
    again = Daemon(identity=None, address=address)
    try:
        assert again.pid != daemon.pid and listening_port(again.pid) == int(address.rpartition("/")[2])
    finally:
        again.stop()


@pytest.mark.parametrize(
    ("address", "announce", "which"),
    [
        ("/ip4/localhost/tcp/0", (), "localhost"),
        ("/ip4/127.0.0.1/tcp/313370", (), "313370"),
        ("/ip4/127.0.0.1/tcp/0", ("203.0.113.7:31337",), "203.0.113.7:31337"),
    ],
)
def test_what_is_no_address_is_a_mistake_of_the_user(address: str, announce: tuple[str, ...], which: str) -> None:
    """It was exit code 1, after which systemd starts the node again and again."""
    with pytest.raises(UserError, match=rf'^not an address: "[^"]*{which}[^"]*": .*/ip4/203\.0\.113\.7/tcp/31337$'):
        Daemon(identity=None, address=address, announce=announce)


def test_the_key_of_a_guest_that_was_killed_is_removed_by_the_next_daemon() -> None:
    """Nothing removed ``noloco-guest-*``, with a private key in it."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    with guest_node(guest_settings([], 5), None) as (guest, _):
        key = guest._settings.identity
        assert key is not None and key.exists() and key.parent.name.startswith(f"noloco-{os.getpid()}-")
        left = key.parent.with_name(key.parent.name.replace(str(os.getpid()), str(ended.pid)))
        shutil.copytree(key.parent, left)
        Daemon(identity=None, address="/ip4/127.0.0.1/tcp/0").stop()
        assert key.exists() and not left.exists()
    assert not key.exists()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_what_another_machine_has_in_a_shared_temporary_folder_stays(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file server, or in one that two containers mount. Process ids there are none here, so the sockets of a
    living peer were removed, and it ended after five minutes.
    """
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    here, there = folder_prefix(), []
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("peer.p2p.daemon.socket.gethostname", lambda: "node-2")
        there.append(folder_prefix())
        elsewhere.undo()
        elsewhere.setattr(Path, "readlink", lambda _: Path("pid:[4026532000]"))
        there.append(folder_prefix())
    assert len({here, *there}) == 3
    folders = [Path(tempfile.mkdtemp(prefix=it.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))) for it in (here, *there)]
    Daemon(identity=None, address="/ip4/127.0.0.1/tcp/0").stop()
    assert set(temporary.iterdir()) == set(folders[1:])


def test_a_temporary_folder_in_which_a_socket_has_no_room_is_a_line(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TMPDIR of some clusters. Above 58 bytes nobody could call the peer, and nothing said so."""
    room = LONGEST_SOCKET - SOCKET_NAME - len(f"/{folder_prefix()}")
    for excess in (1, 0):
        folder = temporary / ("x" * (room + excess - len(f"{temporary}/")))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if excess:
            with pytest.raises(UserError, match=f"^the path of the temporary folder {folder} is 1 bytes too long"):
                Daemon(identity=None, address="/ip4/127.0.0.1/tcp/0")
            continue
        node = Node(NodeSettings(None, "127.0.0.1", 0))
        try:
            node.listen(Reachability())
            assert len(os.fsencode(node.p2p._client_listen_maddr["unix"])) == LONGEST_SOCKET  # hivemind's socket
        finally:
            node.stop()


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


# -- one that hangs


def test_a_peer_whose_daemon_hangs_learns_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lived, so the peer trained alone to the end of the run, with exit code 0."""
    monkeypatch.setattr("peer.p2p.daemon.QUESTION_SECONDS", 0.05)
    monkeypatch.setattr("peer.p2p.daemon.HUNG_SECONDS", 0.1)
    node = Node(NodeSettings(None, "127.0.0.1", 0))
    try:
        node.listen(Reachability())
        assert node._daemon is not None
        psutil.Process(node._daemon.pid).suspend()
        monkeypatch.setattr("peer.p2p.node.RPC_TIMEOUT", 0.1)
        node.call(_all_ended(node), 60)
        assert re.fullmatch(rf"the p2p daemon \(pid {node._daemon.pid}\) hangs: .*", node.failure)
    finally:
        node.close()
        node.kill()


async def _all_ended(node: Node) -> None:
    """What it does in the background."""
    await asyncio.wait(node._tasks)


@pytest.mark.parametrize(
    ("answered", "freeze", "hangs"),
    [(0, 0.0, True), (5, 0.0, False), (5, 3600.0, False)],
    ids=["never", "late", "frozen"],
)
async def test_a_daemon_hangs_when_it_answers_nothing_for_minutes(
    daemon: Daemon, answered: int, freeze: float, hangs: bool
) -> None:
    """``answered``: it answers one question of so many. ``freeze``: seconds in which our process stands still."""
    numbers = itertools.count(1)

    async def ask() -> None:
        number = next(numbers)
        if not answered or number % answered:
            await asyncio.sleep(RPC_TIMEOUT + (freeze if number == 1 else 0.0))
            raise TimeoutError

    watching = asyncio.ensure_future(daemon.watch(ask))
    await asyncio.wait([watching], timeout=freeze + 10 * HUNG_SECONDS)
    watching.cancel()
    assert bool(daemon.failure) == hangs
