"""A group's average, never silently wrong: all have the whole result with the same digest, or nobody uses it.

    members                                             convener
       │ ◀──── streams between all, payloads both ways ────▶ │   reduce.py, lane.py
       │ report: digest of my result, or who failed ───────▶ │   the first failure ends the attempt for all
       │ ◀──────────────────────────── verdict: use it, or not │   use it: all reported the same digest

Who misses the verdict finds out at its next boundary, where its lineage is not that of the others. Why not
hivemind's averager: README, "All-reduce".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import torch
import xxhash

from peer.config.schema import ExchangeConfig
from peer.exchange.average import copy_own, mean_of_senders
from peer.exchange.group.mesh import Lobby, Mesh, Network, together
from peer.exchange.group.reduce import all_gather, all_reduce
from peer.exchange.group.wire import REPORT, VERDICT, Failed, Report, Verdict
from peer.exchange.pair.deadline import Deadline
from peer.exchange.pair.wire import Identity
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.contribution import Averaged, Contribution, Sparse
from peer.rounds.types import Assembly, Group, Outcome

GRACE = 5.0  # seconds on top of a round's deadline before the calling thread gives up on the network thread


class GroupExchange:
    """:class:`peer.exchange.average.GroupAverage` for a group of everyone. ``lobby.enter`` serves ``mesh.PROTOCOL``.

    ``identity.numel``: elements of a contribution, or for sparse ones how many coefficients are sent.
    ``result``: elements of the mean.
    """

    def __init__(
        self, network: Network, lobby: Lobby, identity: Identity, result: int, settings: ExchangeConfig
    ) -> None:
        self._network, self._lobby, self._identity, self._settings = network, lobby, identity, settings
        self._deadline = Deadline(settings.timeout)
        self._buffer = torch.empty(result, dtype=torch.float32)

    def average(self, contribution: Contribution | Sparse, group: Group) -> Averaged:
        if group.assembly is None:
            self._take_own(contribution)
            if group.lost:
                return Averaged(self._buffer, Outcome.TIMEOUT, detail=group.lost)
            return Averaged(self._buffer, Outcome.ALONE, digest=self._digest())
        began, limit = time.monotonic(), self._deadline.seconds
        longest = 2 * limit + 2 * self._settings.stall + GRACE
        mesh = Mesh(self._network, self._lobby, group.assembly, self._identity, self._settings.stall)
        verdict, digest = self._network.call(self._guarded(contribution, group, mesh, limit), longest)
        seconds = time.monotonic() - began
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
            bytes_sent=sum(stream.sent for stream in mesh.streams.values()),
            bytes_received=sum(stream.received for stream in mesh.streams.values()),
            seconds=seconds,
            detail=verdict.detail,
        )

    def _take_own(self, contribution: Contribution | Sparse) -> None:
        if isinstance(contribution, Sparse):
            mean_of_senders([contribution], self._buffer)
        else:
            copy_own(contribution, self._buffer)

    async def _guarded(self, own: Contribution | Sparse, group: Group, mesh: Mesh, limit: float) -> tuple[Verdict, str]:
        """An attempt whose every failure is a verdict."""
        assembly = mesh.assembly
        settle = self._lead if assembly.me == assembly.convener else self._follow
        work = asyncio.ensure_future(self._attempt(own, group.round, mesh, limit))
        try:
            return await settle(work, assembly, limit)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            mesh.close()
            self._lobby.clear()
            for stream in assembly.controls.values():
                stream.close()

    async def _attempt(self, own: Contribution | Sparse, round: int, mesh: Mesh, limit: float) -> Report:
        """This peer's part of the round; its failure is what it reports."""
        stall = self._settings.stall
        try:
            async with asyncio.timeout(limit):
                await mesh.connect(round)
                if isinstance(own, Sparse):
                    await all_gather(own, mesh, self._buffer, stall=stall)
                else:
                    ratio = self._settings.max_norm_ratio
                    await all_reduce(own, mesh, self._buffer, stall=stall, max_norm_ratio=ratio)
                return Report(digest=await asyncio.to_thread(self._digest))
        except Failed as failure:
            return Report(culprit=failure.culprit, outcome=failure.outcome, detail=failure.detail[:200])
        except TimeoutError:
            detail = f"not done within its deadline ({limit:.3g} s)"
            return Report(culprit=mesh.assembly.me, outcome=Outcome.TIMEOUT, detail=detail)

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(memoryview(self._buffer.numpy().data).cast("B"))

    # -- the convener

    async def _lead(self, work: asyncio.Future[Report], assembly: Assembly, limit: float) -> tuple[Verdict, str]:
        async def own() -> tuple[int, Report]:
            return assembly.me, _checked(await work)

        async def of(place: int, control: Stream) -> tuple[int, Report]:
            try:
                return place, _checked(await control.receive(REPORT, limit + self._settings.stall))
            except (TimeoutError, StreamLost, BadMessage) as error:
                detail = f"{assembly.seats[place].name} did not report: {str(error) or 'no answer'}"
                raise Failed(place, Outcome.TIMEOUT, detail[:200]) from None

        digest = ""
        try:
            reports = await together([own(), *(of(place, control) for place, control in assembly.controls.items())])
            digest = reports[0][1].digest
            verdict = _compare(dict(reports), assembly)
        except Failed as failure:
            verdict = Verdict(
                commit=False, culprit=failure.culprit, outcome=failure.outcome, detail=failure.detail[:200]
            )
        await asyncio.gather(
            *(control.send(verdict, self._settings.stall) for control in assembly.controls.values()),
            return_exceptions=True,  # who does not hear it finds out at its next boundary
        )
        closing = (control.until_closed(1.0) for control in assembly.controls.values())
        await asyncio.gather(*closing, return_exceptions=True)
        return verdict, digest

    # -- a member

    async def _follow(self, work: asyncio.Future[Report], assembly: Assembly, limit: float) -> tuple[Verdict, str]:
        control = assembly.controls[assembly.convener]
        hearing = asyncio.ensure_future(control.receive(VERDICT, 2 * limit + self._settings.stall))
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
            name = assembly.seats[assembly.convener].name
            detail = f"{name}, who leads, is gone: {str(error) or 'no verdict'}"
            return Verdict(commit=False, culprit=assembly.convener, outcome=Outcome.TIMEOUT, detail=detail[:200]), ""
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        if verdict.commit and not digest:
            return Verdict(commit=False, outcome=Outcome.CORRUPT, detail="a verdict before this peer was done"), ""
        return verdict, digest


def _checked(report: Report) -> Report:
    if report.culprit is not None or not report.digest:
        raise Failed(report.culprit or 0, report.outcome, report.detail)
    return report


def _compare(reports: dict[int, Report], assembly: Assembly) -> Verdict:
    """Use it when all have the same digest; else the ones with the rarest digest are to blame."""
    held = Counter(report.digest for report in reports.values())
    if len(held) == 1:
        return Verdict(commit=True)
    culprit = min(reports, key=lambda place: (held[reports[place].digest], place == assembly.me))
    detail = f"the result of {assembly.seats[culprit].name} differs from the others'"
    return Verdict(commit=False, culprit=culprit, outcome=Outcome.CORRUPT, detail=detail)
