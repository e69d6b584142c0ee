"""The messages of a swap: a header before the parts, an acknowledgement after them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.config.schema import CodecName
from peer.p2p.bulk.offer import BulkOffer
from peer.p2p.stream import Message
from peer.rounds.types import Count, Outcome, Verdict


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


class Unusable(Exception):
    """The partner's header or contribution must not be used; ``verdict`` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict
