"""``peer.start_with``: peers of a new swarm take their first step together, and the wait has an end."""

from __future__ import annotations

import signal
import time

from tests.swarm.support.harness import Swarm

SHORT = ("run.steps=200", "run.inner_steps=100")
LONGER = ("run.steps=3000", "run.inner_steps=300")  # some seconds on a fast machine, enough to meet


def test_the_first_peer_waits_for_the_second(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    first = swarm.peer("first", *LONGER, "peer.start_with=2", address=address)
    first.line("waiting for others: of=2")
    time.sleep(2)
    assert swarm.rounds("first") == []
    second = swarm.peer("second", *LONGER, "peer.start_with=2", address=address)
    assert first.exit_code(60) == second.exit_code(60) == 0, first.output() + second.output()
    for name in ("first", "second"):
        assert any(row["outcome"] == "merged" for row in swarm.rounds(name)), swarm.rounds(name)


def test_a_peer_begins_without_those_that_never_come(swarm: Swarm) -> None:
    peer = swarm.peer("only", *SHORT, "peer.start_with=3", "peer.start_patience=1")
    peer.line("begins without all: members=1 of=3")
    assert peer.exit_code(30) == 0, peer.output()
    assert swarm.rounds("only")[-1]["step"] == 200


def test_the_record_of_a_killed_peer_does_not_count(swarm: Swarm) -> None:
    """The record stays for half a minute and says that the swarm trains."""
    _, address = swarm.bootstrap()
    killed = swarm.peer("killed", "run.steps=1000000", "run.inner_steps=20", address=address)
    swarm.wait_for_rounds("killed", 2)
    killed.signal(signal.SIGKILL)
    peer = swarm.peer("only", *SHORT, "peer.start_with=2", "peer.start_patience=8", address=address)
    peer.line("begins without all: members=1 of=2")
    assert peer.exit_code(30) == 0, peer.output()
