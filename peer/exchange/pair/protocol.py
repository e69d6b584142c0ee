"""One swap from the header to the verdict; the blocking and the overlapped exchange differ only in their parts.

    initiator                                     responder
       │ header ───────────────────────────────▶ ◀─── header │   both: same size, known codec?
       │ part, digest; part, digest; ... ──────▶ ◀─── parts  │   at the same time; blocking.py, overlapped.py
       │ acknowledgement ──────────────────────▶             │
       │             ◀──────────────────────── acknowledgement│   only after it has read the other one
       │ close ────────────────────────────────▶             │   so nothing can be cut off

A side merges when both verdicts are "merged". When the responder's acknowledgement is lost, the responder has merged
and the initiator has not: NoLoCo allows that, and the initiator reports a timeout. Every other failure is an outcome
too. A swap may take as long as it is worth it (p2p/deadline.py), by this peer's own inner phases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peer import clock
from peer.config.schema import CodecName, ExchangeConfig
from peer.exchange.codec import Codec, size, wrong_size
from peer.exchange.guard import Guard, Judgement, share
from peer.exchange.pair.wire import Acknowledgement, Header, Unusable
from peer.p2p.bulk.offer import agree, offer
from peer.p2p.deadline import THREAD_GRACE, in_time, running, unless_away
from peer.p2p.event_loop import LoopThread
from peer.p2p.payload import CorruptPart, send_parts
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.contribution import Averaged
from peer.rounds.transfer_rule import answer_limit, swap_limit
from peer.rounds.types import Group, Outcome, Reason, Verdict

BLAMED = (Outcome.CORRUPT, Outcome.POISONED, Outcome.TIMEOUT)
# Inner steps of both peers without a part. A partner opens parts only between its steps, so a step of each goes by
# without one as a rule. Six leave room for a step that is long, as with an evaluation.
PART_STEPS = 6.0
LONGEST_STALL_SHARE = 0.5  # of the time limit. A partner says how long its steps are: lies buy no longer silence


@dataclass(frozen=True)
class Transfer:
    """What the two headers fix for the parts."""

    stream: Stream
    judgement: Judgement
    codec: CodecName  # of the partner's parts
    stall: float  # seconds without a byte


Encode = Callable[[Transfer], AsyncIterator[bytes]]  # this peer's parts
# reads the partner's parts; returns the digest by which the guard knows a replay
Receive = Callable[[Transfer], Coroutine[Any, Any, bytes]]


@dataclass(eq=False, kw_only=True)
class PairProtocol:
    """Swaps with one partner at a time, over streams that matchmaking has opened. ``away``: was this peer asked to
    stop or to pause? An overlapped swap is ended by its boundary instead, which counts from the last inner step.
    """

    network: LoopThread
    numel: int
    codec: Codec
    settings: ExchangeConfig
    guard: Guard
    away: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        """What one kind of swap needs besides."""

    def _swap(self, group: Group, encode: Encode, receive: Receive, mean: Tensor) -> Averaged:
        """Swap with the partner in ``group``. ``mean``: the mean of the result."""
        (link,) = group.links
        stream = link.stream
        assert stream is not None
        judgement = self.guard.judgement(link.peer_id, self.numel)
        began, sent, received = clock.monotonic(), stream.all_sent, stream.all_received
        min_stall = self.settings.stall
        swap = as_verdict(self._converse(group, stream, judgement, encode, receive), stream, min_stall)
        time_limit = self._time_limit(group, min_stall)
        longest = self._header_limit(group) + 2 * (min_stall + time_limit)
        verdict = self.network.call(swap, longest + THREAD_GRACE)
        self.codec.end_round(verdict.outcome is Outcome.MERGED, whole=judgement.whole)
        given_up = verdict.outcome is Outcome.TIMEOUT and self.away()  # by this peer
        blamed = (verdict.outcome in BLAMED and not given_up) or verdict.reason is Reason.HEADER
        return Averaged(
            mean=mean,
            outcome=verdict.outcome,
            partners=(link.name,),
            bytes_sent=stream.all_sent - sent,
            bytes_received=stream.all_received - received,
            seconds=clock.monotonic() - began,
            distance=verdict.distance,
            detail=verdict.detail,
            reason=verdict.reason,
            culprits=(link.peer_id,) if blamed else (),
            partner_id=link.peer_id,
            chosen=stream.initiator,
            unresolved=judgement.unresolved,
            strange=judgement.strange,
            ahead=judgement.ahead,
        )

    async def _converse(
        self, group: Group, stream: Stream, judgement: Judgement, encode: Encode, receive: Receive
    ) -> Verdict:
        """From the headers to the verdicts."""
        min_stall = self.settings.stall
        header = await unless_away(self._exchange_headers(stream, group), self.away)
        judgement.ahead, judgement.share = header.round - group.round, share(header.tokens, group.tokens)
        part_seconds = PART_STEPS * (group.step_seconds + header.pace) if group.step_seconds else 0.0
        stall = max(min_stall, min(part_seconds, LONGEST_STALL_SHARE * self._time_limit(group, min_stall)))
        transfer = Transfer(stream, judgement, header.codec, stall)
        until_sent = stream.all_sent + size(self.codec.sends, self.numel)
        until_received = stream.all_received + size(header.codec, self.numel)

        def bytes_left() -> dict[str, int]:
            return {"receiving": until_received - stream.all_received, "sending": until_sent - stream.all_sent}

        async def swap() -> Verdict:
            fingerprint = await both_ways(receive(transfer), send_parts(stream, encode(transfer), stall))
            answer = answer_limit(stall, size(self.codec.sends, self.numel))
            return await exchange_verdicts(stream, judgement.verdict(fingerprint), answer)

        return await in_time(unless_away(swap(), self.away), bytes_left, self._time_limit(group, stall))

    async def _exchange_headers(self, stream: Stream, group: Group) -> Header:
        """The partner's header; raises :class:`Unusable` when it does not fit ours. Parts may go over direct
        connections then, if both want that.
        """
        codec, stall = self.codec, self.settings.stall
        payload_bytes = size(codec.sends, self.numel)
        own = Header(
            codec=codec.sends,
            payload_bytes=payload_bytes,
            round=group.round,
            tokens=group.tokens,
            expects=codec.expects,
            pace=group.step_seconds,
            bulk=offer(stream, payload_bytes),
        )
        await stream.send(own, stall)
        header = await stream.receive(Header, self._header_limit(group))
        refusal = wrong_size(header.codec, header.payload_bytes, self.numel)
        if header.codec not in codec.understands:
            refusal = f"codec is {header.codec} there and {codec.sends} here"
        if refusal:
            raise Unusable(Verdict(Outcome.REFUSED, detail=refusal, reason=Reason.HEADER))
        await agree(stream, own.bulk, header.bulk)
        codec.meet(header.expects)
        return header

    def _header_limit(self, group: Group) -> float:
        """Seconds until the partner's header."""
        return self.settings.stall

    def _time_limit(self, group: Group, stall: float) -> float:
        return swap_limit(stall, self.settings.max_phases, group.phase_seconds)


async def both_ways(receiving: Coroutine[Any, Any, bytes], sending: Coroutine[Any, Any, None]) -> bytes:
    """Run both at once; returns what ``receiving`` returns, and leaves nothing running.

    A lost stream does not end the receive: a partner that refuses this peer's parts closes it, and the parts that it
    sent before must still be judged. Another failure of the send is a defect of this peer.
    """
    async with running(receiving) as (receive,), running(sending) as (send,):
        await asyncio.wait([receive, send], return_when=asyncio.FIRST_EXCEPTION)
        if send.done() and not isinstance(send.exception(), StreamLost | TimeoutError):
            await send
        received = await receive
        await send
        return received


async def exchange_verdicts(stream: Stream, verdict: Verdict, limit: float) -> Verdict:
    """After all parts: exchange the verdicts, each in ``limit`` seconds. A side merges when both are "merged"."""
    mine = Acknowledgement(verdict=verdict.outcome, detail=verdict.detail[:200])
    try:
        if stream.initiator:
            await stream.send(mine, limit)
            theirs = await stream.receive(Acknowledgement, limit)
        else:
            theirs = await stream.receive(Acknowledgement, limit)
            await stream.send(mine, limit)
            await stream.until_closed(limit)
    except (TimeoutError, StreamLost, BadMessage):
        if verdict.outcome is Outcome.MERGED:
            raise
        return verdict  # our objection says more than the loss of the partner
    if verdict.outcome is Outcome.MERGED and theirs.verdict is not Outcome.MERGED:
        return Verdict(Outcome.REFUSED, detail=f"the partner refused: {theirs.verdict} {theirs.detail}".strip())
    return verdict


async def as_verdict(swap: Coroutine[Any, Any, Verdict], stream: Stream, stall: float) -> Verdict:
    """How ``swap`` ended: each failure of it becomes a verdict too. The stream is closed at the end."""
    try:
        with stream.transferring():
            return await swap
    except Unusable as error:
        return error.verdict
    except TimeoutError as error:
        stream.hang_up()  # TCP may pause for minutes before it sends again: the next swap needs a new connection
        return Verdict(Outcome.TIMEOUT, detail=str(error) or f"no answer for {stall:.3g} s or more")
    except StreamLost as error:
        return Verdict(Outcome.TIMEOUT, detail=f"the partner is gone: {error}")
    except CorruptPart as error:
        return Verdict(Outcome.CORRUPT, detail=str(error), reason=Reason.DIGEST)
    except BadMessage as error:
        return Verdict(Outcome.CORRUPT, detail=f"not the protocol: {error}", reason=Reason.PROTOCOL)
    finally:
        stream.close()
