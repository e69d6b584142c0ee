"""What agreeing with others rests on, in pairs as in groups."""

from __future__ import annotations

from dataclasses import dataclass

from peer.p2p.node import Node
from peer.process import Stop
from peer.swarm.boundary import Boundary
from peer.swarm.directory.directory import Members


@dataclass(frozen=True)
class SwarmContext:
    """The network, who is there, where this peer stands, and whether it was asked to stop."""

    node: Node
    members: Members
    boundary: Boundary
    stop: Stop
