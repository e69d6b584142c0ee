"""What matching a peer with others rests on, in pairs as in groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from peer.p2p.greeting import MemberNode
from peer.process import LoopContext
from peer.rounds.backoff import PeerBackoff
from peer.rounds.lineage import Lineage
from peer.swarm.boundary import BoundaryClock
from peer.swarm.directory.directory import Members


class OwnCounters(Protocol):
    """How far this peer is: written by the thread that trains, read by all."""

    round: int
    lineage: Lineage


@dataclass(frozen=True)
class SwarmContext:
    """The network, who is there, how far this peer is, and who is left out for a while."""

    node: MemberNode
    members: Members
    boundary: BoundaryClock
    loop: LoopContext
    counters: OwnCounters
    backoff: PeerBackoff = field(default_factory=PeerBackoff)

    @property
    def stopping(self) -> bool:
        """This peer was asked to stop."""
        return self.loop.stop.requested
