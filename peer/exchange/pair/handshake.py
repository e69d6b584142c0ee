"""The messages of a swap in their order: headers before the parts, verdicts after them.

Previous station: wire.py. Next station: protocol.py, which bounds them in time.
"""

from __future__ import annotations

from peer.exchange.average import Verdict
from peer.exchange.codec import Codec
from peer.exchange.pair.wire import ACKNOWLEDGEMENT, HEADER, Acknowledgement, Header, Identity
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.types import Group, Outcome, Reason

LEAST_SHARE = 0.1  # of a peer in a mean of two


class Unusable(Exception):
    """The partner's header or contribution must not be used; ``verdict`` says why."""

    def __init__(self, outcome: Outcome, detail: str, reason: Reason) -> None:
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail=detail, reason=reason)


async def exchange_headers(
    stream: Stream, identity: Identity, codec: Codec, group: Group, pace: float, stall: float
) -> Header:
    """The partner's header; raises :class:`Unusable` when it does not fit ours. ``pace``: seconds of an inner step."""
    own = identity.header(group.round, codec.sends, tokens=group.tokens, expects=codec.expects, pace=pace)
    await stream.send(own, stall)
    header = await stream.receive(HEADER, stall)
    if not codec.understands(header.codec):
        raise Unusable(Outcome.REFUSED, f"codec is {header.codec} there and {codec.sends} here", Reason.HEADER)
    objection = identity.objection(header)
    if objection:
        raise Unusable(Outcome.REFUSED, objection, Reason.HEADER)
    codec.meet(header.expects)
    return header


def share(theirs: int, own: int) -> float:
    """The partner's share in a mean that is weighted by tokens; bounded, whatever a partner says of itself."""
    total = theirs + own
    return min(max(theirs / total, LEAST_SHARE), 1 - LEAST_SHARE) if total else 0.5


async def exchange_verdicts(stream: Stream, verdict: Verdict, stall: float) -> Verdict:
    """All parts have arrived on both sides: tell each other the verdicts. A side merges when both say so."""
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
