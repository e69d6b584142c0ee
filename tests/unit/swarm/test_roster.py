"""How long a group of everyone waits for whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peer import clock
from peer.p2p.budgets import Proven
from peer.rounds.backoff import PeerBackoff
from peer.swarm.grouping.roster import MEMBER_BACKOFF, NEW_PHASES, NEW_SLACK, KnownMembers


def known(backoff: PeerBackoff, phase: float | None = 2.0, patience: float = 600.0) -> Any:
    node = SimpleNamespace(peer_id="me", proven=Proven())
    boundary = SimpleNamespace(progress=SimpleNamespace(phase_seconds=phase))
    return KnownMembers(SimpleNamespace(node=node, members=None, backoff=backoff, boundary=boundary), patience)  # type: ignore[arg-type]


def test_who_has_taken_part_in_no_round_is_waited_for_some_phases_only() -> None:
    it = known(PeerBackoff())
    assert it.patience("new") == NEW_PHASES * 2.0 + NEW_SLACK
    assert it.patience("me") == 600.0
    it._node.proven.add("old")
    assert it.patience("old") == 600.0
    assert known(PeerBackoff(), phase=None).patience("new") == 600.0
    assert known(PeerBackoff(), patience=5.0).patience("new") == 5.0


def test_who_does_not_come_again_and_again_is_left_out_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    backoff = PeerBackoff()
    it = known(backoff)
    for expected in (1, 2, 4, 8):
        it.missed("new")
        now[0] += expected * MEMBER_BACKOFF - 1
        assert backoff.avoided("new") and not backoff.welcome("new")
        now[0] += 2
        assert not backoff.avoided("new")


def test_one_with_which_the_last_round_succeeded_comes_back_by_a_call() -> None:
    backoff = PeerBackoff()
    it = known(backoff)
    it._node.proven.add("old")
    it.missed("old")
    assert backoff.avoided("old") and backoff.welcome("old") and not backoff.avoided("old")
    it.missed("old")
    assert not backoff.welcome("old"), "it has missed two in turn"
