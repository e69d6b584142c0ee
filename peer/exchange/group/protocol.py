"""A group's average: all members have the whole result with the same digest, or nobody uses it.

    members                                             leader
       │ ◀──── streams between all, payloads both ways ────▶ │   all_reduce.py or all_gather.py
       │ report: digest of its result, or a culprit ───────▶ │   a failure soon ends the attempt for all
       │ ◀──────────────────────────── verdict: use it, or not │   use it: all reported the same digest

Whom most of the failed members name made the attempt fail. If only one says so, it may lie, or the line between the two
is cut: then both are suspects, and one of them is left out (swarm/grouping/roster.py). Whom the leader names, and this
member has not seen fail, is left out when it is named again.
A round may take as long as it is worth it (p2p/deadline.py), by inner phases of the leader, so that all give up at the
same time. A member that misses the verdict learns it at its next boundary: its lineage differs from the others', or
does not (training/blocking.py).
Why hivemind's averager is not used: peer/exchange/README.md.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import xxhash

from peer import clock
from peer.config.schema import ExchangeConfig
from peer.exchange.group.streams import Carried, GroupStreams, IncomingStreams
from peer.exchange.group.wire import GroupFailure, GroupVerdict, MemberReport
from peer.p2p.deadline import THREAD_GRACE, Leaving, in_time, running, unless_away
from peer.p2p.greeting import MemberNode
from peer.p2p.stream import BadMessage, M, Stream, StreamLost
from peer.rounds.contribution import Averaged, as_bytes, host_vector
from peer.rounds.transfer_rule import swap_limit
from peer.rounds.types import Assembly, Group, Outcome

Each = TypeVar("Each")
ACCUSATIONS = 1.0  # seconds for further reports after the first that says that the attempt has failed
Settled = tuple[GroupVerdict, str]  # and the digest of this peer's result, unless it is known that nobody uses it


@dataclass(eq=False)
class GroupProtocol(ABC, Generic[Each]):
    """:class:`peer.exchange.average.Exchange` for a group of everyone; ``Each``: the kind of contribution.

    ``incoming.accept`` handles :data:`streams.REDUCE_PROTOCOL`. ``numel``: elements of a contribution; ``result``:
    elements of the mean. ``away``: was this peer asked to stop or to pause?
    """

    _network: MemberNode
    _incoming: IncomingStreams
    _numel: int
    _result: int
    _settings: ExchangeConfig
    _away: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._buffer = host_vector(self._result)

    def average(self, contribution: Each, group: Group) -> Averaged:
        if group.assembly is None:
            self._take_own(contribution)
            if group.lost:
                return Averaged(self._buffer, Outcome.TIMEOUT, detail=group.lost)
            return Averaged(self._buffer, Outcome.ALONE, digest=self._digest())
        began, stall = clock.monotonic(), self._settings.stall
        limit = swap_limit(stall, self._settings.max_phases, group.assembly.phase)
        longest = 2 * limit + 2 * stall + THREAD_GRACE
        carried = self._carries(len(group.assembly.seats))
        streams = GroupStreams(self._network, self._incoming, group.assembly, self._numel, stall, carried)
        verdict, digest = self._network.call(self._guarded(contribution, group.round, streams, limit), longest)
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

    async def _guarded(self, own: Each, round: int, streams: GroupStreams, limit: float) -> Settled:
        """An attempt; each failure becomes a verdict."""
        assembly = streams.assembly
        settle = self._lead if assembly.me == 0 else self._follow
        try:
            async with running(self._attempt(own, round, streams, limit)) as (work,):
                return await settle(work, assembly, limit)
        finally:
            self._incoming.clear()
            for stream in (*streams.by_place.values(), *assembly.controls.values()):
                stream.close()

    async def _attempt(self, own: Each, round: int, streams: GroupStreams, limit: float) -> MemberReport:
        """This peer's part of the round; a failure becomes its report."""

        async def work() -> str:
            await streams.connect(round)
            await self._combine(own, streams)
            return await clock.in_thread(self._digest)

        try:
            return MemberReport(digest=await in_time(unless_away(work(), self._away), streams.left, limit))
        except GroupFailure as failure:
            return MemberReport(culprit=failure.culprit, outcome=failure.outcome, detail=failure.detail[:200])
        except Leaving as error:
            return MemberReport(culprit=streams.assembly.me, outcome=Outcome.TIMEOUT, detail=str(error))
        except TimeoutError as error:
            culprit, detail = streams.slowest(), str(error)
            if culprit is not None:
                detail = f"{streams.name_of(culprit)} is the slowest: {detail}"
            return MemberReport(culprit=culprit, outcome=Outcome.TIMEOUT, detail=detail[:200])

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(as_bytes(self._buffer))

    async def _hear(self, kind: type[M], control: Stream, work: asyncio.Future[MemberReport], limit: float) -> M:
        """What another member says of the round: after this peer's ``work``, within as long again and a stall."""
        began, stall = clock.monotonic(), self._settings.stall
        async with running(control.receive(kind, 2 * limit + stall)) as (hearing,):
            first: list[asyncio.Future[Any]] = [work, hearing]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(clock.monotonic() - began + stall):
                return await hearing

    # -- the leader

    async def _lead(self, work: asyncio.Future[MemberReport], assembly: Assembly, limit: float) -> Settled:
        async def of(place: int, control: Stream) -> MemberReport:
            try:
                return _sane(await self._hear(MemberReport, control, work, limit), place)
            except (TimeoutError, StreamLost, BadMessage) as error:
                detail = f"{assembly.seats[place].name} did not report: {str(error) or 'no answer'}"
                return MemberReport(culprit=place, outcome=Outcome.TIMEOUT, detail=detail[:200])

        async with running(work, *(of(*it) for it in assembly.controls.items())) as each:
            coming = dict(zip((assembly.me, *assembly.controls), each, strict=True))
            reports = await _until_decided(coming, min(ACCUSATIONS, self._settings.stall / 2))
        verdict = _compare(reports, assembly) if all(map(_succeeded, reports.values())) else _blame(reports, assembly)
        await asyncio.gather(
            *(control.send(verdict, self._settings.stall) for control in assembly.controls.values()),
            return_exceptions=True,  # a member that misses it learns so at its next boundary
        )
        closing = (control.until_closed(1.0) for control in assembly.controls.values())
        await asyncio.gather(*closing, return_exceptions=True)
        return verdict, reports[assembly.me].digest if verdict.commit else ""

    # -- a member

    async def _follow(self, work: asyncio.Future[MemberReport], assembly: Assembly, limit: float) -> Settled:
        control = assembly.controls[0]
        digest = ""
        try:
            async with running(self._hear(GroupVerdict, control, work, limit)) as (hearing,):
                first: list[asyncio.Future[Any]] = [work, hearing]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    report = work.result()
                    digest = report.digest
                    await control.send(report, self._settings.stall)
                async with asyncio.timeout(2 * limit if digest else self._settings.stall):
                    verdict = await hearing
        except (TimeoutError, StreamLost, BadMessage) as error:
            detail = f"the leader {assembly.seats[0].name} is gone: {str(error) or 'no verdict'}"
            return _nobody(Outcome.TIMEOUT, detail, 0), digest
        seen = work.result() if work.done() else None
        if seen is not None and seen.outcome is Outcome.POISONED:  # whatever the leader says
            return _nobody(seen.outcome, seen.detail, *([] if seen.culprit is None else [seen.culprit])), ""
        if verdict.commit != (verdict.outcome is Outcome.MERGED) or verdict.outcome is Outcome.ALONE:
            return _nobody(Outcome.CORRUPT, "a verdict that contradicts itself", 0), ""
        if verdict.commit and not digest:
            return _nobody(Outcome.CORRUPT, "a verdict before this peer was done"), ""
        if seen is None or seen.culprit not in verdict.culprits or seen.outcome is not verdict.outcome:
            # only the leader says so, or says worse of it than this peer has seen
            verdict = verdict.model_copy(update={"certain": False})
        return verdict, digest if verdict.commit else ""


async def _until_decided(coming: Mapping[int, asyncio.Future[MemberReport]], more: float) -> dict[int, MemberReport]:
    """The reports by place: all, or those that have come ``more`` seconds after the first failure. A member that others
    name is not waited for.
    """
    until, reports = math.inf, dict[int, MemberReport]()
    while clock.monotonic() < until:
        named = {report.culprit for report in reports.values()}
        left = [report for place, report in coming.items() if place not in reports and place not in named]
        if not left:
            break
        patience = None if until == math.inf else until - clock.monotonic()
        await asyncio.wait(left, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        reports = {place: report.result() for place, report in coming.items() if report.done()}
        if until == math.inf and not all(map(_succeeded, reports.values())):
            until = clock.monotonic() + more
    return reports


def _succeeded(report: MemberReport) -> bool:
    return bool(report.digest) and report.outcome is Outcome.MERGED and report.culprit is None


def _sane(report: MemberReport, place: int) -> MemberReport:
    """A report that says neither a result nor a failure is a failure of its sender, the member at ``place``."""
    if _succeeded(report) or report.outcome not in (Outcome.MERGED, Outcome.ALONE):
        return report
    detail = "a report that has neither a result nor a failure"
    return MemberReport(culprit=place, outcome=Outcome.CORRUPT, detail=detail)


def _compare(reports: Mapping[int, MemberReport], assembly: Assembly) -> GroupVerdict:
    """Use the result when all have the same digest; else it may be a member with the rarest digest, or who sent it
    another mean.
    """
    held = Counter(report.digest for report in reports.values())
    if len(held) == 1:
        return GroupVerdict(commit=True)
    culprit = min(reports, key=lambda place: (held[reports[place].digest], place == assembly.me))
    detail = f"the result of {assembly.seats[culprit].name} differs from the others'"
    return _nobody(Outcome.CORRUPT, detail, culprit, certain=False)


def _blame(reports: Mapping[int, MemberReport], assembly: Assembly) -> GroupVerdict:
    """Whom the failed members name. What only one of them says, and not this peer, may be a lie."""
    named: dict[int, list[int]] = {}  # by the culprit's place: who says so
    failed = {place: report for place, report in reports.items() if not _succeeded(report)}
    for place, report in failed.items():
        if report.culprit is not None:
            named.setdefault(report.culprit, []).append(place)
    if not named:
        return _nobody(Outcome.TIMEOUT, next(iter(failed.values())).detail)
    culprit = max(named, key=lambda place: (len(named[place]), assembly.me in named[place], -place))
    outcomes = Counter(failed[place].outcome for place in named[culprit])

    def worth(place: int) -> tuple[bool, int, bool]:
        """What this peer has seen, or most have; of two the milder, as a line may fail while another member lies."""
        outcome = failed[place].outcome
        return place == assembly.me, outcomes[outcome], outcome is Outcome.TIMEOUT

    witness = max(named[culprit], key=worth)
    alone = len(named[culprit]) == 1 and witness not in (assembly.me, culprit)
    suspects = (culprit, witness) if alone else (culprit,)
    return _nobody(failed[witness].outcome, failed[witness].detail, *suspects, certain=not alone)


def _nobody(outcome: Outcome, detail: str, *culprits: int, certain: bool = True) -> GroupVerdict:
    """Nobody uses the result."""
    return GroupVerdict(commit=False, culprits=culprits, certain=certain, outcome=outcome, detail=detail[:200])
