"""The messages of a swap in their order: a header before the parts, an acknowledgement after them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.config.schema import CodecName
from peer.exchange.codec import Codec, size
from peer.p2p.bulk.offer import BulkOffer, agree, offer
from peer.p2p.stream import BadMessage, Message, Stream, StreamLost
from peer.rounds.types import Count, Group, Outcome, Reason, Verdict


class Header(Message):
    """What follows. That both train the same run was checked when the stream was opened (p2p/greeting.py)."""

    kind: Literal["header"] = "header"
    codec: CodecName = "none"  # of the parts that follow; the two directions may differ
    payload_bytes: Count
    round: Count
    tokens: Count = 1  # since the last average: the weight of the contribution
    expects: Annotated[float, Field(ge=0, le=1e30)] = 0.0  # distance of two elements, for the codec
    pace: Annotated[float, Field(ge=0, le=1e5)] = 0.0  # seconds of an inner step, in an overlapped swap
    bulk: BulkOffer | None = None


class Acknowledgement(Message):
    """``merged``: all parts of the receiver of this message are verified and accepted."""

    kind: Literal["acknowledgement"] = "acknowledgement"
    verdict: Outcome
    detail: Annotated[str, Field(max_length=200)] = ""


def objection(header: Header, numel: int) -> str:
    """Why ``header`` does not announce a contribution of ``numel`` elements; empty when it does."""
    expected = size(header.codec, numel)
    if header.payload_bytes == expected:
        return ""
    return f"payload_bytes is {header.payload_bytes} there and {expected} here"


class Unusable(Exception):
    """The partner's header or contribution must not be used; ``verdict`` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


async def exchange_headers(stream: Stream, numel: int, codec: Codec, group: Group, stall: float) -> Header:
    """The partner's header; raises :class:`Unusable` when it does not fit ours. Parts may go over direct connections
    then, if both want that.
    """
    own = Header(
        codec=codec.sends,
        payload_bytes=size(codec.sends, numel),
        round=group.round,
        tokens=group.tokens,
        expects=codec.expects,
        pace=group.step_seconds,
        bulk=offer(stream, size(codec.sends, numel)),
    )
    await stream.send(own, stall)
    header = await stream.receive(Header, stall)
    refusal = objection(header, numel)
    if header.codec not in codec.understands:
        refusal = f"codec is {header.codec} there and {codec.sends} here"
    if refusal:
        raise Unusable(Verdict(Outcome.REFUSED, detail=refusal, reason=Reason.HEADER))
    await agree(stream, own.bulk, header.bulk)
    codec.meet(header.expects)
    return header


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
