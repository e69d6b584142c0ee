"""Who a peer is to those that it talks to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from peer.config.digest import first_difference
from peer.logs import get_logger
from peer.p2p.stream import Message

log = get_logger("party")
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Decline(Message):
    """No. ``run`` is the decliner's configuration when that is the reason."""

    kind: Literal["decline"] = "decline"
    reason: Annotated[str, Field(max_length=200)]
    run: str | None = None


@dataclass(frozen=True)
class Party:
    """Who this peer is, in a negotiation. ``canonical`` is the run's configuration as one text."""

    name: str
    run: str
    config: str
    canonical: str
    _warned: set[str] = field(default_factory=set)

    def warn_of_difference(self, name: str, theirs: str) -> None:
        """Say once for each peer in which key its run differs."""
        if name not in self._warned and len(self._warned) < 1000:
            self._warned.add(name)
            log.warning("peer %s trains another configuration: %s", name, first_difference(self.canonical, theirs))
