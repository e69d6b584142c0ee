"""A group's average: all members have the whole result with the same digest, or nobody uses it.

    members                                             leader
       │ ◀──── streams between all, payloads both ways ────▶ │   all_reduce.py or all_gather.py
       │ report: digest of its result, or a culprit ───────▶ │   a failure soon ends the attempt for all
       │ ◀──────────────────────────── verdict: use it, or not │   verdict.py; use it: all reported the same digest

A round may take as long as it is worth it (p2p/deadline.py), by inner phases of the leader, so that all give up at the
same time. A member that misses the verdict learns it at its next boundary: its lineage differs from the others', or
does not (training/boundaries/group_weights.py).
Why hivemind's averager is not used: peer/exchange/README.md.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import xxhash

from peer import clock
from peer.config.schema import ExchangeConfig
from peer.exchange.group.deadlines import RoundDeadlines
from peer.exchange.group.streams import Carried, GroupStreams, IncomingStreams
from peer.exchange.group.verdict import believed, decided, nobody, sane, succeeded, until_decided
from peer.exchange.group.wire import GroupFailure, GroupVerdict, MemberReport
from peer.p2p.deadline import Leaving, in_time, running, unless_away
from peer.p2p.greeting import MemberNode
from peer.p2p.stream import CLOSE_SECONDS, BadMessage, M, Stream, StreamLost
from peer.rounds.contribution import Averaged, as_bytes, host_vector
from peer.rounds.transfer_rule import swap_limit
from peer.rounds.types import Assembly, Group, Outcome

Each = TypeVar("Each")
Attempt = asyncio.Future[MemberReport]  # this peer's part of a round, which runs or has ended
Decision = tuple[GroupVerdict, str]  # and the digest of this peer's result, unless it is known that nobody uses it


@dataclass(eq=False, kw_only=True)
class GroupProtocol(ABC, Generic[Each]):
    """:class:`peer.rounds.contribution.Exchange` for a group of everyone; ``Each``: the kind of contribution.

    ``incoming.accept`` handles :data:`streams.REDUCE_PROTOCOL`. ``numel``: elements of a contribution. ``away``: was
    this peer asked to stop or to pause?
    """

    network: MemberNode
    incoming: IncomingStreams
    numel: int
    settings: ExchangeConfig
    away: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._buffer = host_vector(self.numel)

    def average(self, contribution: Each, group: Group) -> Averaged:
        if group.assembly is None:
            self._take_own(contribution)
            if group.lost:
                return Averaged(self._buffer, Outcome.TIMEOUT, detail=group.lost)
            return Averaged(self._buffer, Outcome.ALONE, digest=self._digest())
        began, stall = clock.monotonic(), self.settings.stall
        deadlines = RoundDeadlines(stall, swap_limit(stall, self.settings.max_phases, group.assembly.phase_seconds))
        carried = self._carries(len(group.assembly.seats))
        streams = GroupStreams(self.network, self.incoming, group.assembly, self.numel, stall, carried)
        work = self._decided_attempt(contribution, group.round, streams, deadlines)
        verdict, digest = self.network.call(work, deadlines.longest)
        if verdict.commit:
            self._used()
        else:
            self._take_own(contribution)
        ids = [seat.peer_id for seat in group.assembly.seats]
        return Averaged(
            mean=self._buffer,
            outcome=verdict.outcome,
            partners=tuple(link.name for link in group.links),
            culprits=tuple(ids[place] for place in verdict.culprits if place < len(ids)),
            certain=verdict.certain,
            digest=digest if verdict.commit else "",
            unheard="" if verdict.commit else digest,
            bytes_sent=sum(stream.all_sent for stream in streams.by_place.values()),
            bytes_received=sum(stream.all_received for stream in streams.by_place.values()),
            seconds=clock.monotonic() - began,
            detail=verdict.detail,
        )

    @abstractmethod
    def _take_own(self, contribution: Each) -> None:
        """The buffer ← the mean over a group of this peer alone."""

    def _used(self) -> None:
        """All members use the mean."""

    @abstractmethod
    def _carries(self, members: int) -> Carried:
        """What each sends to each other one in a group of so many."""

    @abstractmethod
    async def _combine(self, own: Each, streams: GroupStreams) -> None:
        """The buffer ← the mean of all contributions. After a :class:`GroupFailure` the buffer is undefined."""

    async def _decided_attempt(
        self, own: Each, round: int, streams: GroupStreams, deadlines: RoundDeadlines
    ) -> Decision:
        """An attempt, up to its verdict; each failure becomes one."""
        assembly = streams.assembly
        decide = self._lead if assembly.me == 0 else self._follow
        try:
            async with running(self._attempt(own, round, streams, deadlines.limit)) as (work,):
                return await decide(work, assembly, deadlines)
        finally:
            self.incoming.clear()
            for stream in (*streams.by_place.values(), *assembly.controls.values()):
                stream.close()

    async def _attempt(self, own: Each, round: int, streams: GroupStreams, limit: float) -> MemberReport:
        """This peer's part of the round; a failure becomes its report."""

        async def work() -> str:
            await streams.connect(round)
            await self._combine(own, streams)
            return await clock.in_thread(self._digest)

        try:
            return MemberReport(digest=await in_time(unless_away(work(), self.away), streams.left, limit))
        except GroupFailure as failure:
            return failure.report
        except Leaving as error:
            return MemberReport(culprit=streams.assembly.me, outcome=Outcome.TIMEOUT, detail=str(error))
        except TimeoutError as error:
            culprit, detail = streams.slowest(), str(error)
            if culprit is not None:
                detail = f"{streams.name_of(culprit)} is the slowest: {detail}"
            return MemberReport(culprit=culprit, outcome=Outcome.TIMEOUT, detail=detail[:200])

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(as_bytes(self._buffer))

    async def _hear(self, kind: type[M], control: Stream, work: Attempt, deadlines: RoundDeadlines) -> M:
        """What another member says of the round, while this peer's ``work`` runs or afterwards."""
        began = clock.monotonic()
        async with running(control.receive(kind, deadlines.latest)) as (hearing,):
            first: list[asyncio.Future[Any]] = [work, hearing]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            failed = work.done() and not succeeded(work.result())
            took, by_leader = clock.monotonic() - began, kind is GroupVerdict
            async with asyncio.timeout(deadlines.until_said(took, failed=failed, by_leader=by_leader)):
                return await hearing

    # -- the leader

    async def _lead(self, work: Attempt, assembly: Assembly, deadlines: RoundDeadlines) -> Decision:
        async def of(place: int, control: Stream) -> MemberReport:
            try:
                return sane(await self._hear(MemberReport, control, work, deadlines), place)
            except (TimeoutError, StreamLost, BadMessage) as error:
                detail = f"{assembly.seats[place].name} did not report: {str(error) or 'no answer'}"
                return MemberReport(culprit=place, outcome=Outcome.TIMEOUT, detail=detail[:200])

        async with running(work, *(of(*it) for it in assembly.controls.items())) as each:
            coming = dict(zip((assembly.me, *assembly.controls), each, strict=True))
            reports = await until_decided(coming, deadlines.accusations)
        verdict = decided(reports, assembly)
        await asyncio.gather(
            *(control.send(verdict, self.settings.stall) for control in assembly.controls.values()),
            return_exceptions=True,  # a member that misses it learns so at its next boundary
        )
        closing = (control.until_closed(CLOSE_SECONDS) for control in assembly.controls.values())
        await asyncio.gather(*closing, return_exceptions=True)
        return verdict, reports[assembly.me].digest if verdict.commit else ""

    # -- a member

    async def _follow(self, work: Attempt, assembly: Assembly, deadlines: RoundDeadlines) -> Decision:
        control = assembly.controls[0]

        async def report() -> None:
            await control.send(await asyncio.shield(work), self.settings.stall)  # work goes on after an early verdict

        try:
            async with running(report()):
                said = await self._hear(GroupVerdict, control, work, deadlines)
                seen = work.result() if work.done() else None
        except (TimeoutError, StreamLost, BadMessage) as error:
            detail = f"the leader {assembly.seats[0].name} is gone: {str(error) or 'no verdict'}"
            digest = work.result().digest if work.done() else ""
            return nobody(Outcome.TIMEOUT, detail, 0), digest
        verdict = believed(said, seen)
        return verdict, seen.digest if seen is not None and verdict.commit else ""
