"""What a peer writes of itself, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from peer import clock
from peer.p2p.dht import search
from peer.swarm.directory.directory import Members
from peer.swarm.directory.records import LIFETIME, RUNS
from tests.unit.parts import member_record

AHEAD = 600.0  # seconds


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The end of each record that was written."""
    ends: list[float] = []

    async def write(_: Any, key: str, __: Any, record: search.Held, nodes: Iterable[Any]) -> set[Any]:
        if key != RUNS:
            ends.append(record.expires)
        return set(nodes)

    async def keepers(*_: Any) -> list[str]:
        return ["QmB"]

    monkeypatch.setattr(search, "write", write)
    monkeypatch.setattr(search, "keepers", keepers)
    return ends


def test_a_peer_whose_clock_was_ahead_is_seen_again_when_it_is_set(
    written: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node keeps a record that lasts for so long, and for ten minutes each new one was to last longer still."""
    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    members, record, now = Members(node, "demo", lambda: member_record("QmA")), member_record("QmA"), clock.unix()

    def at(seconds: float) -> float:
        """The end of what is written then; 0 when nothing is."""
        written.clear()
        monkeypatch.setattr(clock, "unix", lambda: now + seconds)
        asyncio.run(members._store(record))
        return max(written) - now if written else 0.0

    assert at(AHEAD) == pytest.approx(AHEAD + LIFETIME)
    assert at(1.0) == pytest.approx(1.0 + LIFETIME)
    assert at(0.0) == 0.0  # a clock that is set by a second has no need of it


def test_who_has_left_says_nothing_more(written: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its announcing went on while it left, and others looked for it until the record ended."""
    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    node.call = lambda work, _: asyncio.run(work)
    members = Members(node, "demo", lambda: member_record("QmA"))
    members.announce()
    members.leave()
    written.clear()
    asyncio.run(members._tell())
    assert not written
