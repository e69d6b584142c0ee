"""A bootstrap node whose network is cut does not say that all peers are lost; one without peers is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dht_bootstrap import watch as watching
from dht_bootstrap.history import RunHistory
from dht_bootstrap.watch import SILENT_SECONDS, Silence, Watch
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME
from tests.unit.parts import member_record


@pytest.mark.parametrize(
    ("looks", "silent"),
    [
        ([None, 5.0, 5.0, 4.0, 0.0], [False, True, True, True, True]),
        ([0.0, 0.0, 5.0, 5.0], [False] * 4),  # none has ever answered
        ([None, 5.0, 6.0, 6.0, 0.0], [False, True, False, False, False]),  # peers behind a NAT write here
        ([None, 5.0, 6.0, None, 6.0, 6.0], [False, True, False, False, True, True]),
        ([None, 5.0, None, 7.0, 6.0], [False, True, False, True, True]),
    ],
)
def test_the_others_are_silent_when_none_answers_any_more_and_no_record_comes(
    looks: list[float | None], silent: list[bool]
) -> None:
    """Each look: when the newest record ends; ``None``: another node answers."""
    silence = Silence()
    assert [silence.look(newest or 0.0, alone=newest is not None) for newest in looks] == silent


class Scene:
    """A bootstrap node's looks; ``after``: seconds since the last one that succeeded."""

    def __init__(self) -> None:
        self.watch = Watch(SimpleNamespace(failure="", p2p=None))  # type: ignore[arg-type]

    def look(self, *entries: Entry, alone: bool, after: float = 2.0) -> bool:
        """Whether it succeeded."""

        async def look() -> dict[str, dict[str, Entry]]:
            return {"demo": {it.record.peer_id: it for it in entries}} if entries else {}

        if self.watch._read_at is not None:
            self.watch._read_at -= after
        before = self.watch.reads["ok"]
        asyncio.run(self.watch.read(SimpleNamespace(look=look, alone=alone)))  # type: ignore[arg-type]
        return self.watch.reads["ok"] > before

    @property
    def run(self) -> RunHistory:
        return self.watch.runs["demo"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    async def count(_: Any) -> int:
        return 0

    monkeypatch.setattr(watching, "count_peers", count)
    yield Scene()


def entry(name: str, written: float, **changes: Any) -> Entry:
    """A record that was written ``written`` seconds after now."""
    return Entry(member_record(name).model_copy(update=changes), time.time() + written + LIFETIME)


def test_a_node_whose_network_is_cut_does_not_lose_its_peers(scene: Scene) -> None:
    """It did after half a minute: ``/targets`` was an empty list, and Prometheus forgot all peers."""
    members = [entry("a", 0.0), entry("b", 3.0)]
    assert scene.look(*members, alone=False)
    assert scene.look(*members, alone=True)  # the records last for half a minute
    assert not scene.look(members[1], alone=True)
    assert not scene.look(alone=True, after=watching.STALE)
    assert scene.watch.reads["failed"] == 2 and "no other node answers" in scene.watch.failure
    assert scene.run.live().keys() == {"a", "b"}
    assert scene.look(entry("a", 60.0), entry("b", 60.0), alone=False)
    assert [it.event for it in scene.run.events] == ["joined"] * 2 and not scene.watch.failure


def test_peers_that_died_all_at_once_are_lost_after_an_hour(scene: Scene) -> None:
    assert scene.look(entry("a", 0.0), alone=False) and scene.look(entry("a", 0.0), alone=True)
    assert not scene.look(alone=True)
    assert scene.look(alone=True, after=SILENT_SECONDS)
    assert scene.run.ended_at and scene.look(alone=True)


def test_a_node_that_is_alone_is_well(scene: Scene) -> None:
    """Before the first peer, after the last one has left, and while its only peers are behind a NAT."""
    assert scene.look(alone=True)
    assert scene.look(entry("a", 0.0), entry("nat", 0.0), alone=False)
    assert scene.look(entry("a", 2.0, state="left"), entry("nat", 0.0), alone=True)
    assert scene.look(entry("nat", 9.0), alone=True)
    assert scene.look(alone=True)  # it was killed, and what is said of it came through the network
    assert [it.event for it in scene.run.events][2:] == ["left", "lost"]
    other = Scene()
    assert other.look(entry("a", 0.0), alone=False) and other.look(entry("a", 2.0, state="left"), alone=True)
    assert other.look(alone=True) and other.run.ended_at
