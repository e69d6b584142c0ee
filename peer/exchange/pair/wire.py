"""What two partners say around their parts: a header before them, an acknowledgement after them.

Next station: handshake.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import xxhash
from pydantic import Field, TypeAdapter

from peer.config.schema import CodecName
from peer.exchange.codec import payload_bytes
from peer.p2p.stream import Message
from peer.rounds.types import Outcome


class Header(Message):
    """What follows. That both train the same run was said when the stream was opened (p2p/greeting.py)."""

    kind: Literal["header"] = "header"
    codec: CodecName = "none"  # of the parts that follow; the two directions may differ
    payload_bytes: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0, le=2**53)] = 1  # since the last average: the weight of the contribution
    expects: Annotated[float, Field(ge=0, le=1e30)] = 0.0  # how far off the partner's elements may be, by the codec
    pace: Annotated[float, Field(ge=0, le=1e5)] = 0.0  # seconds of an inner step, when the swap overlaps with them


class Acknowledgement(Message):
    """``merged`` means: all of your parts are verified and acceptable to me."""

    kind: Literal["acknowledgement"] = "acknowledgement"
    verdict: Outcome
    detail: Annotated[str, Field(max_length=200)] = ""


HEADER: TypeAdapter[Header] = TypeAdapter(Header)
ACKNOWLEDGEMENT: TypeAdapter[Acknowledgement] = TypeAdapter(Acknowledgement)


@dataclass(frozen=True)
class Identity:
    """What both sides of a swap must have in common."""

    numel: int

    def header(
        self, round: int, codec: CodecName = "none", *, tokens: int = 1, expects: float = 0.0, pace: float = 0.0
    ) -> Header:
        return Header(
            codec=codec,
            payload_bytes=payload_bytes(codec, self.numel),
            round=round,
            tokens=tokens,
            expects=expects,
            pace=pace,
        )

    def objection(self, header: Header) -> str:
        """Why ``header`` is not acceptable; empty when it is."""
        expected = self.header(header.round, header.codec)
        if header.payload_bytes == expected.payload_bytes:
            return ""
        return f"payload_bytes is {header.payload_bytes} there and {expected.payload_bytes} here"


def layout_digest(layout: str) -> str:
    """Digest of a model's parameter names and shapes."""
    return xxhash.xxh3_128_hexdigest(layout.encode())
