"""What agreeing with others rests on, in pairs as in groups."""

from __future__ import annotations

from dataclasses import dataclass

from peer.p2p.node import Node
from peer.process import Stop
from peer.swarm.boundary import Boundary
from peer.swarm.directory.directory import Members
from peer.swarm.party import Party


@dataclass(frozen=True)
class SwarmContext:
    """The network, who is there, where this peer stands, whether it was asked to stop, and who it is."""

    node: Node
    members: Members
    boundary: Boundary
    stop: Stop
    me: Party
