"""A group's average: all members have the whole result with the same digest, or nobody uses it.

    members                                             leader
       │ ◀──── streams between all, payloads both ways ────▶ │   all_reduce.py or all_gather.py
       │ report: digest of its result, or a culprit ───────▶ │   the first failure ends the attempt for all
       │ ◀──────────────────────────── verdict: use it, or not │   use it: all reported the same digest

A member that misses the verdict learns it at its next boundary: its lineage differs from the others'. Why hivemind's
averager is not used: peer/exchange/README.md.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Generic, TypeVar

import torch
import xxhash

from peer import clock
from peer.config.schema import ExchangeConfig
from peer.exchange.deadline import THREAD_GRACE, Deadline, together
from peer.exchange.group.streams import GroupStreams, IncomingStreams
from peer.exchange.group.wire import GroupFailure, GroupVerdict, MemberReport
from peer.p2p.greeting import MemberNode
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.contribution import Averaged, as_bytes
from peer.rounds.types import Assembly, Group, Outcome

Each = TypeVar("Each")
Settled = tuple[GroupVerdict, str]  # and the digest of this peer's result, where it has one


class GroupProtocol(ABC, Generic[Each]):
    """:class:`peer.exchange.average.Exchange` for a group of everyone; ``Each``: the kind of contribution.

    ``incoming.accept`` handles :data:`streams.REDUCE_PROTOCOL`. ``numel``: elements of a contribution; ``result``:
    elements of the mean.
    """

    def __init__(
        self, network: MemberNode, incoming: IncomingStreams, numel: int, result: int, settings: ExchangeConfig
    ) -> None:
        self._network, self._incoming, self._numel, self._settings = network, incoming, numel, settings
        self._deadline = Deadline(settings.timeout)
        self._buffer = torch.empty(result, dtype=torch.float32)

    def average(self, contribution: Each, group: Group) -> Averaged:
        if group.assembly is None:
            self._take_own(contribution)
            if group.lost:
                return Averaged(self._buffer, Outcome.TIMEOUT, detail=group.lost)
            return Averaged(self._buffer, Outcome.ALONE, digest=self._digest())
        began, limit = clock.monotonic(), self._deadline.seconds
        longest = 2 * limit + 2 * self._settings.stall + THREAD_GRACE
        streams = GroupStreams(self._network, self._incoming, group.assembly, self._numel, self._settings.stall)
        verdict, digest = self._network.call(self._guarded(contribution, group.round, streams, limit), longest)
        seconds = clock.monotonic() - began
        if verdict.commit:
            self._deadline.observe(seconds)
        else:
            self._take_own(contribution)
        seats = group.assembly.seats
        return Averaged(
            mean=self._buffer,
            outcome=verdict.outcome,
            partners=tuple(link.name for link in group.links),
            culprit="" if verdict.culprit is None or verdict.culprit >= len(seats) else seats[verdict.culprit].peer_id,
            digest=digest if verdict.commit else "",
            bytes_sent=sum(stream.sent for stream in streams.by_place.values()),
            bytes_received=sum(stream.received for stream in streams.by_place.values()),
            seconds=seconds,
            detail=verdict.detail,
        )

    @abstractmethod
    def _take_own(self, contribution: Each) -> None:
        """The buffer ← the mean over a group of this peer alone."""

    @abstractmethod
    async def _combine(self, own: Each, streams: GroupStreams) -> None:
        """The buffer ← the mean of all contributions. After a :class:`GroupFailure` the buffer is undefined."""

    async def _guarded(self, own: Each, round: int, streams: GroupStreams, limit: float) -> Settled:
        """An attempt; each failure becomes a verdict."""
        assembly = streams.assembly
        settle = self._lead if assembly.me == 0 else self._follow
        work = asyncio.ensure_future(self._attempt(own, round, streams, limit))
        try:
            return await settle(work, assembly, limit)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._incoming.clear()
            for stream in (*streams.by_place.values(), *assembly.controls.values()):
                stream.close()

    async def _attempt(self, own: Each, round: int, streams: GroupStreams, limit: float) -> MemberReport:
        """This peer's part of the round; a failure becomes its report."""
        try:
            async with asyncio.timeout(limit):
                await streams.connect(round)
                await self._combine(own, streams)
                return MemberReport(digest=await clock.in_thread(self._digest))
        except GroupFailure as failure:
            return MemberReport(culprit=failure.culprit, outcome=failure.outcome, detail=failure.detail[:200])
        except TimeoutError:
            detail = f"not done within its deadline ({limit:.3g} s)"
            return MemberReport(culprit=streams.assembly.me, outcome=Outcome.TIMEOUT, detail=detail)

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(as_bytes(self._buffer))

    # -- the leader

    async def _lead(self, work: asyncio.Future[MemberReport], assembly: Assembly, limit: float) -> Settled:
        async def own() -> tuple[int, MemberReport]:
            return assembly.me, _checked(assembly.me, await work)

        async def of(place: int, control: Stream) -> tuple[int, MemberReport]:
            try:
                return place, _checked(place, await control.receive(MemberReport, limit + self._settings.stall))
            except (TimeoutError, StreamLost, BadMessage) as error:
                detail = f"{assembly.seats[place].name} did not report: {str(error) or 'no answer'}"
                raise GroupFailure(place, Outcome.TIMEOUT, detail) from None

        digest = ""
        try:
            reports = await together([own(), *(of(place, control) for place, control in assembly.controls.items())])
            digest = reports[0][1].digest
            verdict = _compare(dict(reports), assembly)
        except GroupFailure as failure:
            verdict = _nobody(failure.outcome, failure.detail, failure.culprit)
        await asyncio.gather(
            *(control.send(verdict, self._settings.stall) for control in assembly.controls.values()),
            return_exceptions=True,  # a member that misses it learns so at its next boundary
        )
        closing = (control.until_closed(1.0) for control in assembly.controls.values())
        await asyncio.gather(*closing, return_exceptions=True)
        return verdict, digest

    # -- a member

    async def _follow(self, work: asyncio.Future[MemberReport], assembly: Assembly, limit: float) -> Settled:
        control = assembly.controls[0]
        hearing = asyncio.ensure_future(control.receive(GroupVerdict, 2 * limit + self._settings.stall))
        first: list[asyncio.Future[Any]] = [work, hearing]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            digest = ""
            if work.done():
                report = work.result()
                digest = report.digest
                await control.send(report, self._settings.stall)
            async with asyncio.timeout(limit if digest or not work.done() else self._settings.stall):
                verdict = await hearing
        except (TimeoutError, StreamLost, BadMessage) as error:
            detail = f"the leader {assembly.seats[0].name} is gone: {str(error) or 'no verdict'}"
            return _nobody(Outcome.TIMEOUT, detail, culprit=0), ""
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        seen = work.result() if work.done() else None
        if seen is not None and seen.outcome is Outcome.POISONED:  # whatever the leader says
            return _nobody(seen.outcome, seen.detail, seen.culprit), ""
        if verdict.commit != (verdict.outcome is Outcome.MERGED):
            return _nobody(Outcome.CORRUPT, "a verdict that contradicts itself", culprit=0), ""
        if verdict.commit and not digest:
            return _nobody(Outcome.CORRUPT, "a verdict before this peer was done"), ""
        return verdict, digest


def _checked(place: int, report: MemberReport) -> MemberReport:
    """The report of the member at ``place``, if it has a result."""
    if report.culprit is not None and report.outcome is not Outcome.MERGED:
        raise GroupFailure(report.culprit, report.outcome, report.detail)
    if not report.digest or report.culprit is not None:
        raise GroupFailure(place, Outcome.CORRUPT, "a report that has neither a result nor a failure")
    return report


def _compare(reports: dict[int, MemberReport], assembly: Assembly) -> GroupVerdict:
    """Use the result when all have the same digest; else a member with the rarest digest is the culprit."""
    held = Counter(report.digest for report in reports.values())
    if len(held) == 1:
        return GroupVerdict(commit=True)
    culprit = min(reports, key=lambda place: (held[reports[place].digest], place == assembly.me))
    detail = f"the result of {assembly.seats[culprit].name} differs from the others'"
    return _nobody(Outcome.CORRUPT, detail, culprit)


def _nobody(outcome: Outcome, detail: str, culprit: int | None = None) -> GroupVerdict:
    """Nobody uses the result."""
    return GroupVerdict(commit=False, culprit=culprit, outcome=outcome, detail=detail[:200])
