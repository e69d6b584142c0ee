"""The swap: one tensor each way with one partner, over a stream that the rendezvous has opened.

    initiator                                     responder
       │ header ───────────────────────────────▶ ◀─── header │   both: equal run, config, layout, size?
       │ 1 MiB parts, digest ──────────────────▶ ◀─── parts  │   at the same time, each into its one buffer
       │                  both: digest right? finite? norm within bounds?
       │ acknowledgement ──────────────────────▶             │
       │             ◀──────────────────────── acknowledgement│   only after it has read the other one
       │ close ────────────────────────────────▶             │   so nothing can be cut off

A side merges when its own verdict and its partner's are both "merged". The only way to a half merge is that
the responder's acknowledgement gets lost: then it has merged and the initiator has not. NoLoCo lives with it;
the initiator counts a timeout and says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import torch

from peer.config import Exchange as Settings
from peer.exchange.average import Verdict, copy_own, judge, merge
from peer.exchange.deadline import Deadline
from peer.exchange.wire import ACKNOWLEDGEMENT, HEADER, Acknowledgement, Identity
from peer.payload import receive_payload, send_payload
from peer.rounds import Averaged, Contribution, Group, Outcome, Sparse
from peer.streams import BadMessage, Stream, StreamLost

T = TypeVar("T")
GRACE = 5.0  # seconds on top of a swap's deadline before the calling thread gives up on the network thread


class Network(Protocol):
    """The one thing a swap needs of the node: run a coroutine on its loop, with a deadline."""

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T: ...


class PairExchange:
    """:class:`peer.exchange.average.GroupAverage` for groups of two."""

    def __init__(self, network: Network, identity: Identity, settings: Settings) -> None:
        self._network = network
        self._identity = identity
        self._settings = settings
        self._deadline = Deadline(settings.timeout)
        self._buffer = torch.empty(identity.numel, dtype=torch.float32)

    def average(self, contribution: Contribution | Sparse, group: Group) -> Averaged:
        assert not isinstance(contribution, Sparse), "pairs swap whole vectors"
        if not group.links:
            copy_own(contribution, self._buffer)
            return Averaged(self._buffer, Outcome.ALONE)
        (link,) = group.links
        stream = link.stream
        assert stream is not None
        sent, received, began = stream.sent, stream.received, time.monotonic()
        limit = self._deadline.seconds
        verdict = self._network.call(self._guarded(contribution, stream, group.round, limit), limit + GRACE)
        seconds = time.monotonic() - began
        if verdict.outcome is Outcome.MERGED:
            self._deadline.observe(seconds)
            merge(contribution, self._buffer)
        else:
            copy_own(contribution, self._buffer)
        return Averaged(
            mean=self._buffer,
            outcome=verdict.outcome,
            partners=(link.name,),
            bytes_sent=stream.sent - sent,
            bytes_received=stream.received - received,
            seconds=seconds,
            distance=verdict.distance,
            detail=verdict.detail,
        )

    async def _guarded(self, own: Contribution, stream: Stream, round: int, limit: float) -> Verdict:
        """A swap whose every failure is a verdict; when merged, the buffer holds the partner's contribution."""
        try:
            async with asyncio.timeout(limit):
                return await self._swap(own, stream, round)
        except TimeoutError:
            return Verdict(Outcome.TIMEOUT, detail=f"no answer within its deadline ({limit:.3g} s in all)")
        except StreamLost as error:
            return Verdict(Outcome.TIMEOUT, detail=f"the partner is gone: {error}")
        except BadMessage as error:
            return Verdict(Outcome.CORRUPT, detail=f"not the protocol: {error}")
        finally:
            stream.close()

    async def _swap(self, own: Contribution, stream: Stream, round: int) -> Verdict:
        stall = self._settings.stall
        await stream.send(self._identity.header(round), stall)
        objection = self._identity.objection(await stream.receive(HEADER, stall))
        if objection:
            return Verdict(Outcome.REFUSED, detail=objection)
        intact = await self._both_ways(own, stream, stall)
        if intact:
            verdict = await asyncio.to_thread(judge, own, self._buffer, self._settings.max_norm_ratio)
        else:
            verdict = Verdict(Outcome.CORRUPT, detail="the payload does not match its digest")
        try:
            theirs = await self._acknowledge(stream, verdict, stall)
        except (TimeoutError, StreamLost, BadMessage):
            if verdict.outcome is Outcome.MERGED:
                raise
            return verdict  # what we found wrong says more than that the partner has left since
        if verdict.outcome is Outcome.MERGED and theirs.verdict is not Outcome.MERGED:
            return Verdict(Outcome.REFUSED, detail=f"the partner refused: {theirs.verdict} {theirs.detail}".strip())
        return verdict

    async def _both_ways(self, own: Contribution, stream: Stream, stall: float) -> bool:
        sending = asyncio.ensure_future(send_payload(stream, own, stall))
        try:
            intact = await receive_payload(stream, self._buffer, stall)
            await sending
            return intact
        finally:
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _acknowledge(self, stream: Stream, verdict: Verdict, stall: float) -> Acknowledgement:
        mine = Acknowledgement(verdict=verdict.outcome, detail=verdict.detail[:200])
        if stream.initiator:
            await stream.send(mine, stall)
            return await stream.receive(ACKNOWLEDGEMENT, stall)
        theirs = await stream.receive(ACKNOWLEDGEMENT, stall)
        await stream.send(mine, stall)
        await stream.until_closed(stall)
        return theirs
