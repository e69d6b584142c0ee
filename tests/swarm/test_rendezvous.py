"""Meetings between real nodes; the inner steps are sleeps, so that many rounds fit into a test."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from peer.config import Rendezvous as Settings
from peer.progress import Progress, Stop
from peer.swarm import identity
from peer.swarm.meeting import Party
from peer.swarm.node import Node, NodeSettings
from peer.swarm.presence import Presence, Vitals

STEPS, STEP_SECONDS = 10, 0.1


class Peer:
    """A presence whose training is sleeping."""

    def __init__(self, name: str, folder: Path, initial: tuple[str, ...]) -> None:
        key = folder / f"{name}.key"
        identity.load_or_create(key)
        self.name, self.round = name, 0
        self.partners: Counter[str] = Counter()
        self.waits: list[float] = []
        self.progress, self.stop = Progress(), Stop()
        self.node = Node(NodeSettings(key, "127.0.0.1", 0, initial_peers=initial))
        self.node.start()
        self.presence = Presence(
            self.node,
            Party(name, "test", "c", "{}"),
            "layout",
            group_size=2,
            settings=Settings(),
            progress=self.progress,
            stop=self.stop,
            vitals=lambda: Vitals(self.round * STEPS, self.round, 0.0),
            metrics_address=None,
        )
        self.presence.enter(lambda: pytest.fail("nobody should ask for the state"), 0)

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self.progress.begin(STEPS, STEPS)
            for _ in range(STEPS):
                time.sleep(STEP_SECONDS * random.uniform(0.9, 1.1))
                self.progress.tick()
                if self.stop.requested:
                    return
            began = time.monotonic()
            group = self.presence.group_for(self.round)
            self.waits.append(time.monotonic() - began)
            self.round += 1
            for link in group.links:
                self.partners[link.name] += 1
                assert link.stream is not None
                self.node._thread.loop.call_soon_threadsafe(link.stream.close)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        peers: list[Peer] = []
        for name in "abcd":
            peers.append(Peer(name, tmp_path, peers[0].node.addresses if peers else ()))
            stack.callback(peers[-1].presence.leave)
        for peer in peers:
            peer.presence._members.refresh_all()
        yield peers


def train_all(peers: list[Peer], rounds: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=peer.train, args=(rounds,), daemon=True) for peer in peers]
    for thread in threads:
        time.sleep(random.uniform(0, 0.3))
        thread.start()
    return threads


def join_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()


def test_partners_change_and_hardly_anybody_waits_or_stays_alone(four: list[Peer]) -> None:
    join_all(train_all(four, 14))
    met = {peer.name: dict(peer.partners) for peer in four}
    assert all(len(peer.partners) >= 2 for peer in four), met
    assert sum(sum(peer.partners.values()) for peer in four) >= 0.75 * 14 * 4, met
    waits = sorted(wait for peer in four for wait in peer.waits)
    assert waits[len(waits) // 2] < 0.3 * STEPS * STEP_SECONDS, waits
    for one in four:  # a meeting has two sides
        for other in four:
            assert abs(one.partners[other.name] - other.partners[one.name]) <= 1, met


def test_a_partner_that_dies_before_the_boundary_costs_little(four: list[Peer]) -> None:
    *others, victim = four
    threads = train_all(four, 8)
    time.sleep(3.5)
    victim.stop.request()
    victim.node.kill()  # as a crash: no goodbye, the record stays in the directory
    join_all(threads[:3])
    for peer in others:
        assert peer.round == 8
        assert max(peer.waits) < 6.0, peer.waits
        assert sum(peer.partners.values()) >= 4, peer.partners
