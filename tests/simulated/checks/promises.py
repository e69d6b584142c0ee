"""The promises that hold for every swarm, checked while it runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from peer.p2p import budgets
from peer.p2p.reachability.relay import RELAY_PROTOCOL, Relay
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged, as_bytes
from peer.rounds.types import Outcome
from peer.swarm.directory.buckets import LAST_LEVEL, READS
from peer.swarm.directory.reader import Reader
from tests.simulated.p2p.network import CIRCUITS
from tests.simulated.peer import SimulatedPeer
from tests.simulated.scenario import CALM, ENDLESS, EVERYONE

if TYPE_CHECKING:
    from tests.simulated.world import World

ALONE_PHASES = 4  # boundaries in a row without a merge beside somebody who has none either
MOST_TASKS = 60  # of one process, two for each other peer, and each read of the directory with its requests
MOST_STREAMS = 3  # of one peer, and two for each other peer: a notice, and a join or what is averaged


class Promises:
    """Checks one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._alone: dict[str, dict[str, int]] = defaultdict(
            lambda: defaultdict(int)
        )  # boundaries, by two peers' names
        self._lineages: dict[str, str] = {}  # digest of φ by digest of the lineage
        self._unseen: set[tuple[str, str]] = set()
        self._saved: dict[str, int] = {}  # round of the checkpoint at a crash

    def watch(self, peer: SimulatedPeer) -> None:
        """This peer has joined."""
        assert peer.trainer is not None
        boundary: Any = peer.trainer.boundary
        cross, ended = boundary.cross, boundary.presence.ended
        saved = self._saved.pop(peer.name, 0)
        if boundary.counters.round < saved:
            self._world.violation(f"{peer.name} came back at round {boundary.counters.round}, its disk has {saved}")

        def crossed(inner: InnerReport) -> bool:
            over: bool = cross(inner)
            self._bounded(peer)
            if boundary.outer.equal_replicas:
                self._equal(peer, boundary)
            return over

        def noted(averaged: Averaged) -> None:
            ended(averaged)
            merged = averaged.outcome is Outcome.MERGED
            liars = {key for it in self._world.peers if not it.honest for key in (it.name, it.host.peer_id)}
            partners = {*averaged.partners, averaged.partner_id}
            # One of a pair meets nobody else meanwhile. A group goes on without the member that made its round fail.
            held = not merged and self._world.scenario.kind not in EVERYONE and liars & partners
            if not held:
                self._note_alone(peer, merged=merged)

        boundary.cross, boundary.presence.ended = crossed, noted

    def crashed(self, peer: SimulatedPeer) -> None:
        self._saved[peer.name] = peer.disk.scalars.get("round", 0)
        self._alone.pop(peer.name, None)

    # -- nobody stays alone

    def _note_alone(self, peer: SimulatedPeer, *, merged: bool) -> None:
        own = self._alone[peer.name]
        if merged:
            own.clear()
            return
        others = {
            other.name: other for other in self._world.peers if other is not peer and self._could_meet(peer, other)
        }
        for name in list(own):
            if name not in others:
                del own[name]
        for name in others:
            own[name] += 1
            if own[name] > ALONE_PHASES < self._alone[name][peer.name]:
                self._world.violation(f"{peer.name} and {name} stay alone, and could meet")
                own[name] = 0

    def _could_meet(self, one: SimulatedPeer, other: SimulatedPeer) -> bool:
        """Both train, see each other, and accept each other."""
        if not (one.honest and other.honest and one.training and other.training) or self._world.scenario.accused:
            return False
        if self._spoilt(one, other) or not self._world.network.reachable(one.host, other.host):
            return False
        if not all(self._world.relays.reached(it) for it in self._concerned(one, other) if it.training):
            return False
        if max(one.step_seconds, other.step_seconds) > 2 * min(one.step_seconds, other.step_seconds):
            return False
        return self._sees(one, other) and self._sees(other, one)

    def _concerned(self, one: SimulatedPeer, other: SimulatedPeer) -> Sequence[SimulatedPeer]:
        """Whose faults can keep the two from merging: in a group of everyone those of all."""
        return self._world.peers if self._world.scenario.kind in EVERYONE else (one, other)

    def _spoilt(self, one: SimulatedPeer, other: SimulatedPeer) -> bool:
        """Does a line break off or slow their swaps?"""
        world = self._world
        return any(
            world.scenario.spoilt(world.peers.index(it), world.loop.time()) for it in self._concerned(one, other)
        )

    def _sees(self, one: SimulatedPeer, other: SimulatedPeer) -> bool:
        assert one.trainer is not None and one.process is not None
        presence: Any = one.trainer.member.presence
        known = any(record.peer_id == other.host.peer_id for record in presence.others())
        return known and not one.process.frozen and not presence._context.backoff.avoided(other.host.peer_id)

    # -- equal replicas

    def _equal(self, peer: SimulatedPeer, boundary: Any) -> None:
        lineage = boundary.counters.lineage.digest
        digest = xxhash.xxh3_128_hexdigest(as_bytes(boundary.outer.slow.phi))
        if lineage and self._lineages.setdefault(lineage, digest) != digest:
            self._world.violation(f"{peer.name} has other slow weights than a peer of its lineage")

    # -- everything is bounded

    def _bounded(self, peer: SimulatedPeer) -> None:
        assert peer.process is not None
        count = len(self._world.peers)
        coroutines = (task.get_coro() for task in peer.process.tasks)
        names = [it.__qualname__ for it in coroutines if it is not None]
        names = [name for name in names if not name.startswith("SimulatedDHT")]
        pipes = names.count(Relay._pipe.__qualname__)  # two of a circuit, beside its handler and what ends it
        reads = min(names.count(Reader._read.__qualname__), READS + LAST_LEVEL + 1)
        if pipes > 2 * budgets.HOPS.all or len(names) > MOST_TASKS + 2 * count + 2 * pipes + 4 * reads:
            common = max(set(names), key=names.count)
            self._world.violation(f"{peer.name} has {len(names)} tasks, most of them {common}")
        # a closed one whose last bytes are on a slow line is the line's, for as long as that has others to carry
        ways = [pipe for link in peer.host.links.values() for pipe in link.streams if not pipe.closed]
        circuits = sum(pipe.protocol in (*CIRCUITS, RELAY_PROTOCOL) for pipe in ways)
        streams = len(ways) - circuits
        if streams > 2 * (MOST_STREAMS + 2 * count):  # each has two directions
            self._world.violation(f"{peer.name} has {streams // 2} open streams")
        if circuits > 2 * (MOST_STREAMS + 2 * count * count):  # of all pairs, at a relay
            self._world.violation(f"{peer.name} has {circuits // 2} open streams as a relay or to relays")

    # -- at the end

    def look(self) -> None:
        """Some time before the end: a record that could not be used is forgotten until it is read again."""
        self._unseen = self.unseen()

    def unseen(self) -> set[tuple[str, str]]:
        """Pairs of peers that train, long since; the first does not have the second's record."""
        since = self._world.loop.time() - CALM
        training = [peer for peer in self._world.peers if peer.due < since and peer.trainer is not None]
        training = [peer for peer in training if self._world.relays.reached(peer)]
        found = set()
        for peer in training:
            assert peer.trainer is not None
            seen = {record.peer_id for record in peer.trainer.member.presence.others()}
            found |= {(peer.name, it.name) for it in training if it is not peer and it.host.peer_id not in seen}
        return found

    def at_the_end(self) -> None:
        """Long after the last fault: all peers that train are one swarm."""
        now = self._world.loop.time()
        due = [peer for peer in self._world.peers if peer.due < now - CALM]
        training = [peer for peer in due if peer.training]
        for peer in due:
            if not peer.training and self._world.scenario.steps == ENDLESS:
                self._world.violation(f"{peer.name} does not train at the end: {peer.ended or 'it has not joined'}")
        for one, other in sorted(self.unseen() & self._unseen):
            self._world.violation(f"{one} does not see {other} at the end")
        if self._world.scenario.kind not in EVERYONE:
            self._one_root(training)

    def _one_root(self, training: list[SimulatedPeer]) -> None:
        """It spreads from pair to pair, so it takes rounds; an overlapped swap is agreed a phase before it ends."""
        scenario = self._world.scenario
        phases = (3 if scenario.kind == "overlapped" else 2) * math.log2(len(scenario.machines))
        if scenario.calm < phases * scenario.phase_seconds or not all(map(self._world.relays.reached, training)):
            return
        roots = defaultdict(list)
        for peer in training:
            if peer.trainer is not None and peer.honest:
                roots[peer.trainer.state.counters.root].append(peer.name)
        if len(roots) > 1:
            others = [name for root in sorted(roots)[1:] for name in roots[root]]
            self._world.violation(f"{', '.join(others)} do not have the first root at the end")
