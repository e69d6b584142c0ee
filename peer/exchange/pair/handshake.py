"""How a swap begins and ends, whatever lies between: headers, acknowledgements, and a verdict for every failure.

Previous station: wire.py. Next stations: pair.py and rolling.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peer.exchange.average import Verdict
from peer.exchange.codec import Codec
from peer.exchange.guard import Trial
from peer.exchange.pair.wire import ACKNOWLEDGEMENT, HEADER, Acknowledgement, Header, Identity
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.contribution import Averaged
from peer.rounds.types import Link, Outcome, Reason

OFFENCES = (Outcome.CORRUPT, Outcome.POISONED)
LEAST = 0.1  # share of a peer in a mean of two


class Unusable(Exception):
    """The partner's header or contribution must not be used; ``verdict`` says why."""

    def __init__(self, outcome: Outcome, detail: str, reason: Reason) -> None:
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail=detail, reason=reason)


@dataclass(frozen=True)
class Greeting:
    """What this peer says about the payload that it will send."""

    identity: Identity
    round: int
    codec: Codec
    tokens: int
    pace: float = 0.0  # seconds of an inner step, when the swap runs beside them

    async def exchange(self, stream: Stream, stall: float) -> Header:
        """The partner's header; raises :class:`Unusable` when it does not fit ours."""
        own = self.identity.header(
            self.round, self.codec.sends, tokens=self.tokens, expects=self.codec.expects, pace=self.pace
        )
        await stream.send(own, stall)
        header = await stream.receive(HEADER, stall)
        if not self.codec.understands(header.codec):
            raise Unusable(Outcome.REFUSED, f"codec is {header.codec} there and {self.codec.sends} here", Reason.HEADER)
        objection = self.identity.objection(header)
        if objection:
            raise Unusable(Outcome.REFUSED, objection, Reason.HEADER)
        self.codec.meet(header.expects)
        return header


def share(theirs: int, own: int) -> float:
    """The partner's share in a mean that is weighted by tokens; bounded, whatever a partner says of itself."""
    total = theirs + own
    return min(max(theirs / total, LEAST), 1 - LEAST) if total else 0.5


class Tally:
    """What a swap takes, from its first byte on, and what comes of it."""

    def __init__(self, stream: Stream, trial: Trial) -> None:
        self._stream, self._trial, self._began = stream, trial, time.monotonic()
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
            strange=self._trial.strange,
            ahead=self._trial.ahead,
        )


async def part(stream: Stream, verdict: Verdict, stall: float) -> Verdict:
    """Both payloads have arrived: tell each other the verdicts. A side merges when both say so."""
    try:
        theirs = await _acknowledge(stream, verdict, stall)
    except (TimeoutError, StreamLost, BadMessage):
        if verdict.outcome is Outcome.MERGED:
            raise
        return verdict  # what we found wrong says more than that the partner has left since
    if verdict.outcome is Outcome.MERGED and theirs.verdict is not Outcome.MERGED:
        return Verdict(Outcome.REFUSED, detail=f"the partner refused: {theirs.verdict} {theirs.detail}".strip())
    return verdict


async def _acknowledge(stream: Stream, verdict: Verdict, stall: float) -> Acknowledgement:
    mine = Acknowledgement(verdict=verdict.outcome, detail=verdict.detail[:200])
    if stream.initiator:
        await stream.send(mine, stall)
        return await stream.receive(ACKNOWLEDGEMENT, stall)
    theirs = await stream.receive(ACKNOWLEDGEMENT, stall)
    await stream.send(mine, stall)
    await stream.until_closed(stall)
    return theirs


async def guarded(swap: Coroutine[Any, Any, Verdict], stream: Stream, limit: float) -> Verdict:
    """``swap`` within ``limit`` seconds; its every failure is a verdict, and the stream is closed behind it."""
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
    except BadMessage as error:
        return Verdict(Outcome.CORRUPT, detail=f"not the protocol: {error}", reason=Reason.PROTOCOL)
    finally:
        stream.close()


async def both_ways(sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None]) -> None:
    """Both at the same time; when one fails the other ends too."""
    task = asyncio.ensure_future(sending)
    try:
        await receiving
        await task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
