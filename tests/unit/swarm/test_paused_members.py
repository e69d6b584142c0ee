"""Who counts as present: a paused member meets nobody and is waited for by nobody, and still gives its state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peer import clock
from peer.rounds.types import Seat
from peer.swarm.context import SwarmContext
from peer.swarm.directory.directory import Members
from peer.swarm.directory.reader import Entry
from peer.swarm.grouping.known_members import KnownMembers
from peer.swarm.state_transfer.donors import donors_of
from tests.unit.parts import context_of, member_record

CONFIG = member_record("QmA").config


@pytest.fixture
def context() -> SwarmContext:
    """This peer with three members; C is paused."""
    node: Any = SimpleNamespace(member=SimpleNamespace(config=CONFIG), peer_id="QmZ", proven=set(), subkey=b"")
    members = Members(node, "demo", lambda: member_record("QmZ"))
    for name in "ABC":
        state = "paused" if name == "C" else "training"
        record = member_record(f"Qm{name}").model_copy(update={"state": state})
        members.known[record.peer_id] = Entry(record, clock.unix() + 20)
        members.keep(record.peer_id, 60.0)  # all were met lately
    return context_of(node, members)


def ids(records: Any) -> set[str]:
    return {it.peer_id for it in records}


def test_no_candidate_is_paused(context: SwarmContext) -> None:
    assert ids(context.others()) == {"QmA", "QmB"}
    assert ids(context.members.candidates()) == {"QmA", "QmB"}


def test_who_skips_inner_steps_ends_as_soon_as_the_others(context: SwarmContext) -> None:
    """A slow peer of run.inner_time was believed to need four times as long: none of them got the last plain means."""
    slow = context.others()[0].model_copy(update={"tokens_per_second": 40.0})
    assert context.rate_of(slow) == 40.0
    paced = replace(context, tokens_per_step=lambda: 64.0, least_rate=50 / 20.0)
    assert paced.rate_of(slow) == 160.0
    assert paced.rate_of(slow.model_copy(update={"tokens_per_second": 200.0})) == 200.0


def test_a_paused_member_is_there_for_newcomers(context: SwarmContext) -> None:
    assert ids(donors_of(context.members.live(), above=0, reached=0)) == {"QmA", "QmB", "QmC"}


def test_a_group_does_not_count_a_paused_member_that_a_message_named(context: SwarmContext) -> None:
    known = KnownMembers(context, 60.0)
    for seat in known.missing(set()):
        known.learn(seat)
    known.learn(Seat("QmC", "c"))  # in the last round
    assert ids(known.missing(set())) == {"QmA", "QmB"}
    leader = known.leader()
    assert leader is not None and leader.peer_id == "QmA"
