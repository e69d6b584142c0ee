"""``noloco-peer check`` in a swarm that trains: each finding about the other peers, in one line with advice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from peer.config.digest import digest
from peer.config.load import load
from peer.p2p import greeting
from tests.swarm.support.harness import DEMO, TINY, Swarm, clock_ahead
from tests.swarm.support.node_peer import Peer

LONG = ("run.steps=1000000", "run.inner_steps=60")


def check(
    swarm: Swarm,
    name: str,
    *sets: str,
    address: str = "",
    env: dict[str, str] | None = None,
    more: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Exit code and output."""
    common = [f"run.dir={swarm.folder}", f"peer.name={name}", "peer.network.host=127.0.0.1", "peer.device=cpu"]
    words = [word for it in (*TINY, *LONG, *common, *sets) for word in ("--set", it)]
    initial = ["--initial-peers", address] if address else []
    process = swarm.start(f"check-{name}", ["-m", "peer", "check", "--config", str(DEMO), *words, *initial, *more], env)
    return process.exit_code(), process.output()


def line(output: str, start: str) -> str:
    """The only line that begins with ``start``."""
    found = [it for it in output.splitlines() if it.startswith(start)]
    assert len(found) == 1, output
    return found[0]


def test_the_findings_in_a_swarm_that_trains(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    peer = swarm.peer("a", *LONG, address=address)
    peer.line("ready:")
    swarm.wait_for_rounds("a", 1)

    code, said = check(swarm, "b", address=address)
    assert code == 0, said
    assert "1 member trains this configuration" in line(said, "ok    swarm") and ": a" in line(said, "ok    swarm")
    assert address in line(said, "ok    initial peers")
    line(said, "ok    clock")
    line(said, "ok    reachability")
    assert "for direct connections" in line(said, "ok    direct")
    assert "a understands this noloco-peer" in line(said, "ok    version")
    assert "this machine can join" in said.splitlines()[-1]
    assert not (swarm.folder / "b").exists()  # it leaves no files

    code, said = check(swarm, "c", "run.inner.learning_rate=0.5", address=address)
    assert code == 1
    assert "run.inner.learning_rate is 0.5 here and 0.003 there" in line(said, "fail  config")

    (swarm.folder / "d").mkdir()
    shutil.copy(swarm.folder / "a" / "identity.key", swarm.folder / "d" / "identity.key")
    code, said = check(swarm, "d", address=address)
    assert code == 1
    assert "a peer with the same identity is alive: a" in line(said, "fail  identity")

    own = (swarm.folder / "a" / "identity.key").stat().st_mtime
    port = peer.line(r"/tcp/(\d+)").group(1)
    code, said = check(swarm, "a", f"peer.network.port={port}", address=address)  # beside this peer
    assert code == 0, said
    assert "a peer runs in" in line(said, "warn  identity") and port in line(said, "warn  port")
    line(said, "ok    swarm")
    assert (swarm.folder / "a" / "identity.key").stat().st_mtime == own

    taken = address.split("/")[4]
    code, said = check(swarm, "e", f"peer.network.port={taken}", address=address)
    assert code == 1 and taken in line(said, "fail  port")
    line(said, "ok    swarm")  # the other checks still run


def test_a_member_of_another_wire_version_is_a_failure(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """``train`` is refused there; names of protocols were compared, so that this machine could join."""
    monkeypatch.setattr(greeting, "WIRE_VERSION", 99)
    same = digest(load(DEMO, [*TINY, *LONG, "run.name=test"], environment={}).run)
    member = Peer("old", swarm.folder, (), config=same)
    try:
        code, said = check(swarm, "b", "run.name=test", address=member.node.addresses[0])
    finally:
        member.presence.leave()
    assert code == 1
    assert ": old" in line(said, "ok    swarm") and "(wire version 99)" in line(said, "fail  version")


def test_the_speed_of_the_line_to_the_members(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    code, said = check(swarm, "c", address=address, more=("--speed",))
    assert code == 0 and "no member of this configuration is there" in line(said, "ok    speed"), said
    swarm.peer("a", *LONG, address=address).line("ready:")
    swarm.wait_for_rounds("a", 1)

    limit = "peer.network.max_upload=4mbit"
    said = ""
    for _ in range(5):  # the member tells how long its steps are with its next record
        if "by the steps of" not in said:
            code, said = check(swarm, "b", limit, address=address, more=("--speed",))
    assert code == 0, said
    rates = re.search(r"a: up ([\d.]+), down ([\d.]+) Mbit/s, round trip \d+ ms", line(said, "ok    speed"))
    assert rates and float(rates[1]) < 4.5 and float(rates[2]) > 2 * float(rates[1]), said
    assert re.search(r"each way in none take about .* of an inner phase \(.* s, by the steps of the members\)", said)


def test_initial_peers_that_do_not_answer(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    dead = address.replace(f"/tcp/{address.split('/')[4]}", "/tcp/9")
    other = address.rpartition("/")[0] + "/QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ"
    code, said = check(swarm, "b", f"peer.initial_peers=[{dead}, {other}, nonsense]")
    assert code == 1
    assert "connection refused" in line(said, f"warn  initial peers {dead}")
    assert "mismatch" in line(said, f"warn  initial peers {other}")
    assert "is not an address" in line(said, "fail  initial peers initial peer 'nonsense'")
    line(said, "fail  initial peers none answers")
    code, said = check(swarm, "b", f"peer.initial_peers=[{dead}, {address}]")
    assert code == 0 and address in line(said, "ok    initial peers")


@pytest.mark.cold
def test_a_wrong_clock(swarm: Swarm, tmp_path: Path) -> None:
    _, address = swarm.bootstrap()
    code, said = check(swarm, "late", address=address, env=clock_ahead(tmp_path / "shifted", 10))
    assert code == 1
    assert "clock is 10.0 s ahead of" in line(said, "fail  clock") and "NTP" in line(said, "fail  clock")
