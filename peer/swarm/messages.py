"""What the messages of pairing and of grouping have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.p2p.stream import Message

Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Decline(Message):
    """No, not now."""

    kind: Literal["decline"] = "decline"
    reason: Annotated[str, Field(max_length=200)]
