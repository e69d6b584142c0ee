"""The last figures of runs that have ended: a bootstrap node keeps them longer than the directory, and tells onlookers.

    onlooker: opens a stream     bootstrap node: EndedRun ..., then NoMore

They are for people. They are that node's word: the peers' signatures are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer import clock
from peer.p2p.addresses import owner_of
from peer.p2p.deadline import together
from peer.p2p.node import Node
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Message, StreamLost
from peer.rounds.types import Name
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME, Duration, MemberRecord

ENDED_PROTOCOL = "noloco/ended"
ENDED_RUNS = 4  # that are kept after their end: those that lasted longest
ENDED_PEERS = 32  # of each of them: those that gave most


class EndedPeer(Message):
    """``record``: its last one, without what only other peers need, so that a run fits into a message."""

    record: MemberRecord
    age: Duration  # seconds since it was written


class EndedRun(Message):
    """A run and the peers of its last minutes."""

    kind: Literal["ended_run"] = "ended_run"
    run: Name
    age: Duration  # seconds since its end
    peers: Annotated[list[EndedPeer], Field(min_length=1, max_length=ENDED_PEERS)]


class NoMore(Message):
    """These were all."""

    kind: Literal["no_more"] = "no_more"


_ENDED: TypeAdapter[EndedRun | NoMore] = TypeAdapter(Annotated[EndedRun | NoMore, Field(discriminator="kind")])


def last_peer(record: MemberRecord, *, left: bool, age: float) -> EndedPeer:
    """``left``: it has withdrawn its record."""
    report = record.report.model_copy(update={"refused": ()})
    last = record.model_copy(update={"addresses": [], "metrics": None, "root": "", "report": report})
    return EndedPeer(record=last.model_copy(update={"state": "left"}) if left else last, age=age)


async def ended_runs(node: Node, addresses: Sequence[str]) -> dict[str, tuple[float, Mapping[str, Entry]]]:
    """The runs that the nodes at ``addresses`` saw end: when, in unix seconds, and the entries then, by peer id.

    Empty when none of them keeps any; members do not. Ends within some seconds, whatever they answer.
    """
    found: dict[str, tuple[float, Mapping[str, Entry]]] = {}
    for told in await together(_ask(node, owner_of(address)) for address in addresses):
        now = clock.unix()
        for it in told:
            entries = {peer.record.peer_id: Entry(peer.record, now - peer.age + LIFETIME) for peer in it.peers}
            found.setdefault(it.run, (now - it.age, entries))
    return found


async def _ask(node: Node, peer_id: str) -> list[EndedRun]:
    """What it tells before it says something else, or nothing in time."""
    told: list[EndedRun] = []
    with suppress(TimeoutError, StreamLost, BadMessage), closing(await node.open(peer_id, ENDED_PROTOCOL)) as stream:
        while len(told) < ENDED_RUNS and isinstance(it := await stream.receive(_ENDED, MESSAGE_TIMEOUT), EndedRun):
            told.append(it)
    return told
