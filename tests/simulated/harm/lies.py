"""Hostile members: everything is honest but for one lie, so that others meet them like any member."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from peer.exchange.group.all_reduce import _Reduction
from peer.exchange.group.deadlines import RoundDeadlines
from peer.exchange.group.protocol import Decision
from peer.exchange.group.streams import GroupStreams
from peer.exchange.group.verdict import nobody
from peer.exchange.group.wire import MemberReport
from peer.exchange.pair.wire import Acknowledgement, Header
from peer.p2p.deadline import together
from peer.p2p.payload import fp32_parts, receive_fp32, send_parts
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.contribution import Contribution, Vector, host_vector
from peer.rounds.state import State
from peer.rounds.types import Assembly, Group, Outcome, Seat
from peer.swarm.directory.records import MemberRecord
from peer.swarm.grouping.leader import _tell
from peer.swarm.grouping.messages import OutOfDate
from peer.swarm.pairing.agreement import PROPOSAL_ANSWER, Accept, Agreement, Meeting, PartnerReady, Propose
from peer.swarm.pairing.proposals import MEET_PROTOCOL
from peer.training.outer_state import OuterState
from peer.training.trainer import Trainer
from tests.swarm.support.attacks import Attack, Hostile, Unguarded

ACCUSING = ("false report", "false verdict")  # of a member that says that another one failed; of a leader
NO_ROSTER = "no roster"  # of a member of a group that says that it leads, and lets all wait for others
OUT_OF_DATE = "out of date"  # of one that leads a group, and sends all others to a donor that does not exist
FIRST = "first"  # of one that proposes to all others at once, and sends back what each sends
FOREVER, PATIENT = 1e6, 100  # seconds
HONEST_ROUNDS = 10
BOAST, ROOT = 1_000_000, "f" * 16  # rounds and steps that nobody has, of a swarm of its own


def in_state(lie: str, state: OuterState) -> None:
    """A false donor gives newcomers noise with the norms of its vectors. Before it joins."""
    honest = state.snapshot

    def false() -> State:
        given = honest()
        if lie == "boast":
            return replace(given, round=given.round + BOAST, step=given.step + BOAST, root=ROOT)
        return replace(given, vectors=[torch.randn_like(it) * it.norm() / len(it) ** 0.5 for it in given.vectors])

    if lie in ("false donor", "boast"):
        state.snapshot = false  # type: ignore[method-assign]


def in_exchange(lie: str, trainer: Trainer) -> None:
    """A false contribution, none after the header, or nobody at an agreed meeting. A liar accepts all contributions."""
    boundary: Any = trainer.boundary
    exchange = boundary.exchange
    exchange.guard = Unguarded()
    if lie in list(Attack):
        exchange.codec = Hostile(Attack(lie))
    if lie in ACCUSING:
        _accuse(lie, exchange)
    if lie == "false mean":
        exchange._combine = partial(_combined, exchange)
    if lie == "silent":
        exchange._encode = _nothing
    if lie == "boast":
        members = boundary.presence._members
        members._describe = partial(_boasted, members._describe)
    if lie == NO_ROSTER:
        _never_form(boundary.presence.matchmaking)
    if lie == OUT_OF_DATE:
        _send_away(boundary.presence.matchmaking._leader, boundary.counters)
    _in_pairing(lie, boundary.presence)


def _in_pairing(lie: str, presence: Any) -> None:
    matchmaking = presence.matchmaking
    if lie == "no-show":
        matchmaking._partner_of = partial(_absent, matchmaking._agreement)
    if lie == FIRST:
        _meet_all(presence)
    if lie == "calls off":
        matchmaking._partner_of = partial(_calls_off, matchmaking)


def _meet_all(presence: Any) -> None:
    node, meeting = presence._node, set[str]()

    async def meet(record: MemberRecord) -> None:
        proposal = Propose(name=node.member.name, round=record.round, eta=1.0, phase=FOREVER, root=presence.origin.root)
        with contextlib.suppress(StreamLost, BadMessage, TimeoutError):
            stream = await node.open_to_member(record.peer_id, MEET_PROTOCOL, record.addresses)
            try:
                await stream.send(proposal, PATIENT)
                if isinstance(await stream.receive(PROPOSAL_ANSWER, PATIENT), Accept):
                    await _send_back(stream)
            finally:
                stream.close()
        await asyncio.sleep(0.02)
        meeting.discard(record.peer_id)

    async def meet_all() -> None:
        while True:
            for record in presence._context.others():
                if record.peer_id not in meeting:
                    meeting.add(record.peer_id)
                    node.background(meet(record))
            await asyncio.sleep(0.02)

    presence.matchmaking._proposals._propose = _nobody
    node.spawn(meet_all())


async def _nobody(record: MemberRecord) -> None:
    await asyncio.sleep(0.05)


async def _send_back(stream: Stream) -> None:
    await stream.send(PartnerReady(), PATIENT)
    await stream.receive(PartnerReady, PATIENT)
    header = await stream.receive(Header, PATIENT)
    await stream.send(header, PATIENT)
    room = host_vector(header.payload_bytes // 4)
    await receive_fp32(stream, room, PATIENT)
    await send_parts(stream, fp32_parts(Vector(room)), PATIENT)
    await stream.send(Acknowledgement(verdict=Outcome.MERGED), PATIENT)
    await stream.receive(Acknowledgement, PATIENT)


def _never_form(matchmaking: Any) -> None:
    known, leader = matchmaking._known, matchmaking._leader
    known.leader, known.leadership.established = lambda: None, True

    async def gather(round: int, until: float) -> Group:
        for _ in range(PATIENT):
            await leader._tell_to_wait(5.0, "nobody")
            await asyncio.sleep(1.0)
        return Group(round, lost="it lies")

    leader.gather = gather


def _send_away(leader: Any, counters: Any) -> None:
    """After some honest rounds."""
    honest = leader.gather

    async def gather(round: int, until: float) -> Group:
        if counters.round < HONEST_ROUNDS:
            led: Group = await honest(round, until)
            return led
        await asyncio.sleep(1.0)
        members, leader._joined = leader._joined, {}
        for member in members.values():
            await _tell(member, OutOfDate(donor=Seat("Qm" + "x" * 44, "nobody")))
            member.leave()
        return Group(round, lost="it lies")

    leader.gather = gather


def _victim(assembly: Assembly) -> int:
    """The place of the other member with the largest id: in each round the same."""
    others = [place for place in range(len(assembly.seats)) if place != assembly.me]
    return max(others, key=lambda place: assembly.seats[place].peer_id)


def _accuse(lie: str, exchange: Any) -> None:
    """Whatever has happened, the victim's contribution was corrupt."""
    attempt = exchange._attempt

    async def reported(own: Contribution, round: int, streams: GroupStreams, limit: float) -> MemberReport:
        report: MemberReport = await attempt(own, round, streams, limit)
        if streams.assembly.me == 0:  # as a leader it is honest
            return report
        return MemberReport(culprit=_victim(streams.assembly), outcome=Outcome.CORRUPT, detail="it lies")

    async def led(work: asyncio.Future[MemberReport], assembly: Assembly, deadlines: RoundDeadlines) -> Decision:
        await asyncio.wait([work])
        verdict = nobody(Outcome.CORRUPT, "it lies", _victim(assembly))
        for control in assembly.controls.values():
            with contextlib.suppress(TimeoutError, StreamLost):
                await control.send_last(verdict, 1.0)
        return verdict, ""

    if lie == "false report":
        exchange._attempt = reported
    else:
        exchange._lead = led


class _FalseMean(_Reduction):
    """Everybody is to step the other way."""

    def _average(self, weights: list[float], norms: list[float]) -> None:
        super()._average(weights, norms)
        self._rounded = self._rounding.apply(self._mean.neg_())


async def _combined(exchange: Any, own: Contribution, streams: GroupStreams) -> None:
    work = _FalseMean(own, exchange._buffer, streams, exchange.settings, exchange.kept)
    exchange._work = work
    await together([work.reduce(), streams.with_all(work.exchange)])


def _boasted(describe: Callable[[], MemberRecord]) -> MemberRecord:
    record = describe()
    return record.model_copy(update={"round": record.round + BOAST, "step": record.step + BOAST, "root": ROOT})


async def _absent(agreement: Agreement, meeting: Meeting, linger: float) -> None:
    """Neither comes nor says so."""
    agreement.meeting = None
    await asyncio.sleep(1.0)


async def _calls_off(matchmaking: Any, meeting: Meeting, linger: float) -> None:
    """Once its partner is there, and proposes another one to it, which it calls off as well."""
    await asyncio.wait([meeting.came], timeout=10.0)
    matchmaking._agreement.cancel(meeting)
    for record in matchmaking._context.candidates():
        if record.peer_id == meeting.stream.remote:
            await matchmaking._proposals._propose(record)


async def _nothing(*_: Any) -> AsyncIterator[bytes]:
    await asyncio.sleep(FOREVER)
    yield b""
