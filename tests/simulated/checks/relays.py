"""What holds for peers behind a NAT: they find relays, and others reach them through these."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.simulated.p2p.node import SimulatedNode
from tests.simulated.peer import SimulatedPeer

if TYPE_CHECKING:
    from tests.simulated.world import World

# Until a lost relay has been noticed (a ping every 10 s, its answer within 15 s) and others were asked: three that do
# not answer (5 s to open a stream, 5 s for the answer), and as long again until one that was full is asked once more
LONGEST_SEARCH = 90.0  # seconds
SPREAD = 45.0  # seconds until others have read the record with a new address: two looks, a lost one and a calm line


class Relays:
    """Checks one world. Times are virtual seconds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: dict[str, float] = {}  # since when it is called through a relay, by name
        self._sought: dict[str, float] = {}  # since when it has none although one is there

    def reached(self, peer: SimulatedPeer) -> bool:
        """Can all that know it call it, as far as it and its relays can do something about that?"""
        return not peer.host.nat or self._world.loop.time() - self._held.get(peer.name, math.inf) > SPREAD

    def check(self, peer: SimulatedPeer) -> None:
        """Once in each of its rounds."""
        if not peer.host.nat or peer.out < math.inf:  # no relay serves who is not invited any more
            return
        now = self._world.loop.time()
        if any(peer.host.peer_id in node.reservations for node in self._relays(peer, 0.0)):
            self._held.setdefault(peer.name, now)
            self._sought.pop(peer.name, None)
            return
        self._held.pop(peer.name, None)
        if not any(len(node.reservations) < self._places for node in self._relays(peer, LONGEST_SEARCH)):
            self._sought.pop(peer.name, None)
        elif now - self._sought.setdefault(peer.name, now) > LONGEST_SEARCH:
            self._world.violation(
                f"{peer.name} is behind a NAT, and has no relay since {self._sought[peer.name]:.0f} s"
            )
            self._sought[peer.name] = now

    @property
    def _places(self) -> int:
        return self._world.scenario.reservations

    def _relays(self, peer: SimulatedPeer, since: float) -> list[SimulatedNode]:
        """Those that are honest and have been there for so many seconds, on lines that are open now."""
        world, found = self._world, []
        assert peer.trainer is not None and peer.process is not None
        if peer.process.thawed > world.loop.time() - since or not peer.training:
            return []
        if not world.bootstrap_process.dead and world.booted < world.loop.time() - since:
            found.append(world.bootstrap_node)
        seen = {record.peer_id for record in peer.trainer.member.presence.others()}
        for other in world.peers:
            there = other.training and not other.host.nat and other.out == math.inf and peer.out == math.inf
            if there and other.due < world.loop.time() - since and other.host.peer_id in seen:
                assert other.trainer is not None and other.process is not None
                if other.process.thawed < world.loop.time() - since:
                    found.append(other.trainer.member.node)
        return [
            it for it in found if it is not None and world.network.reachable(peer.host, it.host) and not it.bad_relay
        ]
