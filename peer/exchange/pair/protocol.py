"""One swap from the header to the verdict, for the blocking and the overlapped exchange; they differ in the parts only.

    initiator                                     responder
       │ header ───────────────────────────────▶ ◀─── header │   both: equal run, config, layout, size?
       │ part, digest; part, digest; ... ──────▶ ◀─── parts  │   at the same time; blocking.py, overlapped.py
       │ acknowledgement ──────────────────────▶             │
       │             ◀──────────────────────── acknowledgement│   only after it has read the other one
       │ close ────────────────────────────────▶             │   so nothing can be cut off

A side merges when its own verdict and its partner's are both "merged". The only way to a half merge is that
the responder's acknowledgement gets lost: then it has merged and the initiator has not. NoLoCo lives with it;
the initiator counts a timeout and says so. Every other failure is an outcome too, within the swap's deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from peer.config.schema import CodecName, ExchangeConfig
from peer.exchange.average import Verdict
from peer.exchange.codec import Codec
from peer.exchange.deadline import THREAD_GRACE, Deadline
from peer.exchange.guard import Guard, Judgement
from peer.exchange.pair.handshake import SwapHandshake, Unusable, exchange_verdicts, share
from peer.exchange.pair.wire import Identity
from peer.p2p.payload import CorruptPart
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Link, Outcome, Reason

T = TypeVar("T")
OFFENCES = (Outcome.CORRUPT, Outcome.POISONED)
PART_STEPS = 6.0  # inner steps of both without a part: a partner that trains only opens parts between its steps


class SwapNetwork(Protocol):
    """What a swap needs of the node: its loop, and to run a coroutine on it with a deadline."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T: ...


@dataclass(frozen=True)
class Transfer:
    """What the two headers have settled for the parts that follow."""

    stream: Stream
    judgement: Judgement
    codec: CodecName  # of the partner's parts
    share: float  # the partner's, in the mean
    stall: float  # seconds without a byte


class PairProtocol:
    """Swaps with one partner at a time, over streams that the rendezvous has opened."""

    def __init__(
        self, network: SwapNetwork, identity: Identity, codec: Codec, settings: ExchangeConfig, guard: Guard
    ) -> None:
        self._network, self._identity, self._codec, self._settings = network, identity, codec, settings
        self._deadline = Deadline(settings.timeout)
        self._guard = guard

    def _swap(
        self, group: Group, move: Callable[[Transfer], Awaitable[bytes]], mean: Tensor, pace: float = 0.0
    ) -> Averaged:
        """Swap with the partner in ``group``. ``mean``: what the result carries; ``pace``: seconds of an inner step.

        ``move`` sends and receives the parts and returns the fingerprint of the partner's, for its judgement.
        """
        (link,) = group.links
        stream = link.stream
        assert stream is not None
        judgement = self._guard.judgement(link.peer_id, self._identity.numel)
        limit, statistics = self._deadline.seconds, TransferStatistics(stream, judgement)
        handshake = SwapHandshake(self._identity, group.round, self._codec, group.tokens, pace)
        work = self._converse(stream, handshake, judgement, move)
        verdict = self._network.call(guarded(work, stream, limit), limit + THREAD_GRACE)
        averaged = statistics.averaged(verdict, link, mean)
        merged = verdict.outcome is Outcome.MERGED
        self._codec.settle(merged)
        if merged:
            self._deadline.observe(averaged.seconds)
        return averaged

    async def _converse(
        self,
        stream: Stream,
        handshake: SwapHandshake,
        judgement: Judgement,
        move: Callable[[Transfer], Awaitable[bytes]],
    ) -> Verdict:
        stall, pace = self._settings.stall, handshake.pace
        header = await handshake.exchange(stream, stall)
        judgement.ahead = header.round - handshake.round
        if pace:
            stall = max(stall, PART_STEPS * (pace + header.pace))
        fingerprint = await move(
            Transfer(stream, judgement, header.codec, share(header.tokens, handshake.tokens), stall)
        )
        return await exchange_verdicts(stream, judgement.verdict(fingerprint), stall)


class TransferStatistics:
    """What a swap takes, from its first byte on, and what comes of it."""

    def __init__(self, stream: Stream, judgement: Judgement) -> None:
        self._stream, self._judgement, self._began = stream, judgement, time.monotonic()
        self._sent, self._received = stream.sent, stream.received

    def averaged(self, verdict: Verdict, partner: Link, mean: Tensor) -> Averaged:
        """The result of the swap, which has ended now."""
        return Averaged(
            mean=mean,
            outcome=verdict.outcome,
            partners=(partner.name,),
            bytes_sent=self._stream.sent - self._sent,
            bytes_received=self._stream.received - self._received,
            seconds=time.monotonic() - self._began,
            distance=verdict.distance,
            detail=verdict.detail,
            reason=verdict.reason,
            culprit=partner.peer_id if verdict.outcome in OFFENCES else "",
            partner_id=partner.peer_id,
            strange=self._judgement.strange,
            ahead=self._judgement.ahead,
        )


async def guarded(swap: Coroutine[Any, Any, Verdict], stream: Stream, limit: float) -> Verdict:
    """``swap`` within ``limit`` seconds; its every failure is a verdict, and the stream is closed after it."""
    try:
        async with asyncio.timeout(limit):
            return await swap
    except Unusable as error:
        return error.verdict
    except TimeoutError:
        stream.hang_up()  # TCP may be in a pause that has grown to minutes: the next swap needs a new connection
        return Verdict(Outcome.TIMEOUT, detail=f"no answer within its deadline ({limit:.3g} s in all)")
    except StreamLost as error:
        return Verdict(Outcome.TIMEOUT, detail=f"the partner is gone: {error}")
    except CorruptPart as error:
        return Verdict(Outcome.CORRUPT, detail=str(error), reason=Reason.DIGEST)
    except BadMessage as error:
        return Verdict(Outcome.CORRUPT, detail=f"not the protocol: {error}", reason=Reason.PROTOCOL)
    finally:
        stream.close()


async def both_ways(sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, T]) -> T:
    """Both at the same time; when one fails the other ends too. Returns what ``receiving`` does."""
    task = asyncio.ensure_future(sending)
    try:
        received = await receiving
        await task
        return received
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
