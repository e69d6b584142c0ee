"""How peers behave towards each other, and what they keep: promises beside the swarm's own (promises.py)."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from peer.replica.inner_loop import InnerReport
from peer.rounds.backoff import MEMORY
from peer.rounds.contribution import Averaged
from peer.rounds.state import State
from peer.rounds.types import Group, Outcome
from peer.swarm.grouping.matchmaking import GroupMatchmaking
from peer.swarm.pairing.agreement import Propose
from peer.swarm.pairing.matchmaking import PairMatchmaking
from peer.swarm.state_transfer.donor import STATE_PROTOCOL
from tests.simulated.peer import SimulatedPeer
from tests.simulated.scenario import EVERYONE

if TYPE_CHECKING:
    from tests.simulated.world import World

LONGEST_WAIT = 20.0  # seconds of a match, and two inner phases
LONGEST_BACKOFF = 60.0  # seconds for which somebody without a fault is avoided, or eight inner phases
WINDOW = 0.5  # inner phases by which two boundaries may differ when one accepts the other's proposal
EXPIRED = 22.0  # seconds for which a record may be kept after its end: a look and a write that time out, a pause
GOODBYE = 40.0  # seconds, and two inner phases, until nobody merges with a peer whose invitation has ended
BUSY = 15.0  # seconds: a donor may wait so long for a newcomer that is gone
UNREAD = "Task exception was never retrieved"


def fingerprints(state: State) -> set[tuple[int, bytes]]:
    """Each vector's place and digest."""
    return {(place, hashlib.sha1(it.numpy().tobytes()).digest()) for place, it in enumerate(state.vectors)}


class Conduct:
    """Checks one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._given: set[tuple[int, bytes]] = set()  # all vectors that a donor has given: place, fingerprint
        # by both names: strikes and the end of a firm backoff; since when; its end when it was seen last
        self._avoids: dict[tuple[str, str], tuple[tuple[int, float], float, float]] = {}
        self._busy: dict[str, float] = {}  # since when a donor serves nobody
        self._joined: dict[str, float] = {}  # when, by name
        self._late: dict[str, set[tuple[str, str]]] = {}  # streams that came too late for a group's round, by name
        for peer in world.peers:
            peer.born = self._born
        world.loop.complain = self._complain

    def _complain(self, context: dict[str, Any]) -> None:
        what = f"{context.get('message')} {context.get('exception')!r}"
        self._world.say("loop", what)
        if UNREAD in what:
            self._world.violation(f"a task was left behind: {what}")
        elif "handle" in context:  # a fault that failed did not happen
            self._world.violation(f"a callback failed: {what}")

    # -- weights that are taken

    def _born(self, peer: SimulatedPeer, state: Any) -> None:
        """Before it joins."""
        snapshot, adopt, rebase = state.snapshot, state.adopt, state.rebase

        def given() -> State:
            made: State = snapshot()
            self._given.update(fingerprints(made))
            return made

        def taken(state_of_other: State, take: Any, least: int, *rest: Any) -> None:
            if not fingerprints(state_of_other) <= self._given:
                self._world.violation(f"{peer.name} takes weights that nobody has given")
            if state_of_other.round < least and self._world.scenario.kind not in EVERYONE:
                self._world.violation(f"{peer.name} at round {least} takes the weights of round {state_of_other.round}")
            take(state_of_other, *rest)
            if state.counters.round != state_of_other.round:
                self._world.violation(f"{peer.name} took a state of round {state_of_other.round} and has another round")

        state.snapshot = given
        state.adopt = lambda other: taken(other, adopt, 0)
        state.rebase = lambda other, *rest: taken(other, rebase, state.counters.round, *rest)

    # -- once it has joined

    def watch(self, peer: SimulatedPeer) -> None:
        assert peer.trainer is not None
        boundary: Any = peer.trainer.boundary
        presence = boundary.presence
        self._joined[peer.name] = self._world.loop.time()
        if isinstance(presence.matchmaking, PairMatchmaking):
            self._watch_meetings(peer, boundary)
        self._watch_waits(peer, boundary)
        ended = presence.ended

        def noted(averaged: Averaged) -> None:
            self._judge(peer, averaged)
            self._check_partners(peer, averaged, boundary.context.progress.phase_seconds)
            ended(averaged)
            self._check_backoff(peer, presence)
            self._check_bounds(peer, boundary)
            self._world.relays.check(peer)
            if isinstance(presence.matchmaking, GroupMatchmaking) and averaged.partners:
                self._check_late(peer, set(boundary.exchange.incoming._waiting))

        presence.ended = noted

    def _watch_meetings(self, peer: SimulatedPeer, boundary: Any) -> None:
        presence, progress = boundary.presence, boundary.context.progress
        agreement, backoff = presence.matchmaking._agreement, presence._context.backoff
        commit = agreement.commit

        def committed(stream: Any, name: str, said: Any, own_eta: float) -> None:
            if agreement.meeting is not None:
                self._world.violation(f"{peer.name} agrees to meet {name}, and is to meet {agreement.meeting.name}")
            if self._world.invitations and stream.remote not in {it.host.peer_id for it in self._world.peers}:
                self._world.violation(f"{peer.name} agrees to meet an outsider")
            if backoff.avoided(stream.remote):
                self._world.violation(f"{peer.name} agrees to meet {name}, which it avoids")
            if peer.pause.active:
                self._world.violation(f"{peer.name} agrees to meet {name}, and is paused")
            apart = abs((presence._context.boundary.eta() or 0.0) - said.eta)
            phase_seconds = progress.phase_seconds
            if isinstance(said, Propose) and apart > WINDOW * min(phase_seconds, said.phase) + 0.01:
                self._world.violation(f"{peer.name} agrees to meet {name} {apart:.1f} s from its boundary")
            commit(stream, name, said, own_eta)

        agreement.commit = committed

    def _watch_waits(self, peer: SimulatedPeer, boundary: Any) -> None:
        presence, group_for, cross = boundary.presence, boundary.presence.group_for, boundary.cross
        loop, overlapped = self._world.loop, hasattr(boundary, "_swap")
        grouped = isinstance(presence.matchmaking, GroupMatchmaking)
        rollback, judged = boundary.rollback, []
        sample = rollback._sample

        def sampled(*given: Any) -> Any:
            judged.append(loop.time())
            return sample(*given)

        def timed(round: int, ended_phase_number: int | None = None) -> Group:
            began = loop.time()
            group: Group = group_for(round, ended_phase_number)
            took, phase_seconds = loop.time() - began, boundary.context.progress.phase_seconds
            if not (overlapped or grouped) and took > LONGEST_WAIT + 2 * phase_seconds and self._ran(peer, began):
                waited = f"{took:.1f} s for a partner, its phase is {phase_seconds:.1f} s"
                self._world.violation(f"{peer.name} waited {waited}")
            return group

        def crossed(inner: InnerReport) -> bool:
            began, ends = loop.time(), boundary.phase_length.steps_left <= peer.config.run.inner_steps
            over: bool = cross(inner)
            waits = ends or (judged and judged[-1] >= began)  # validation decides on a merge
            if overlapped and not waits and loop.time() > began + 0.1 and self._ran(peer, began):
                self._world.violation(f"{peer.name} waited {loop.time() - began:.1f} s at an overlapped boundary")
            return over

        presence.group_for, boundary.cross = timed, crossed
        rollback._sample = None if sample is None else sampled

    def _ran(self, peer: SimulatedPeer, since: float) -> bool:
        """It was not frozen since then."""
        return peer.process is not None and peer.process.thawed < since

    # -- who did nothing wrong

    def _judge(self, peer: SimulatedPeer, averaged: Averaged) -> None:
        for culprit in self._world.peers:
            named = culprit.host.peer_id in averaged.culprits
            if not named or culprit is peer or not (peer.honest and culprit.honest):
                continue
            if not averaged.outcome.failed:
                self._world.violation(f"{peer.name} blames {culprit.name} for a round that was {averaged.outcome}")
            believed = averaged.certain or not self._world.scenario.accused
            if averaged.outcome is Outcome.CORRUPT and believed and not self._world.network.damaged:
                self._world.violation(f"{peer.name} calls corrupt what {culprit.name} sent: {averaged.detail}")

    def _check_partners(self, peer: SimulatedPeer, averaged: Averaged, phase_seconds: float) -> None:
        """A meeting that was agreed on before is kept."""
        if averaged.outcome is not Outcome.MERGED or not peer.honest:
            return
        ids, names = (averaged.partner_id,), averaged.partners
        partners = [it for it in self._world.peers if it.host.peer_id in ids or it.name in names]
        since = self._world.loop.time() - GOODBYE - 2 * phase_seconds
        for other in partners:
            if since > other.out:
                self._world.violation(f"{peer.name} merged with {other.name}, which is not invited any more")
            if other.pause.active and since > other.paused_at:
                self._world.violation(f"{peer.name} merged with {other.name}, which is paused")

    def _check_backoff(self, peer: SimulatedPeer, presence: Any) -> None:
        now, backoff = self._world.loop.time(), presence._context.backoff
        phase_seconds = presence._context.boundary.progress.phase_seconds
        for other in self._world.peers:
            pair = (peer.name, other.name)
            if other is peer or not backoff.avoided(other.host.peer_id):
                self._avoids.pop(pair, None)
                continue
            honest = peer.honest and other.honest and not (other.damaged or self._world.scenario.accused)
            honest = honest and other.training and self._ran(other, now - LONGEST_BACKOFF)
            reachable = self._world.network.reachable(peer.host, other.host)
            reachable = reachable and self._world.relays.reached(other)
            reachable = reachable and not any(self._spoilt(it) for it in (peer, other))  # each call may time out again
            if not honest or not reachable:
                self._avoids.pop(pair, None)
                continue
            held = backoff._held[other.host.peer_id]
            if not held.firm and self._refuses(other, peer):  # it was told so, and asks others; the other is judged
                continue
            event = held.strikes, held.until if held.firm else 0.0
            before, since, until = self._avoids.get(pair, (event, now, math.inf))
            began = held.until - (held.forgotten - held.until) / (MEMORY - 1)
            if event != before or began > until:  # something has happened between them again
                since = now
            self._avoids[pair] = event, since, held.until
            if now - since > max(LONGEST_BACKOFF, 8 * phase_seconds) + 10:
                self._world.violation(f"{peer.name} avoids {other.name} since {self._avoids.pop(pair)[1]:.0f} s")

    def _spoilt(self, peer: SimulatedPeer) -> bool:
        """Does a fault spoil its line now?"""
        return self._world.scenario.spoilt(self._world.peers.index(peer), self._world.loop.time())

    def _refuses(self, one: SimulatedPeer, other: SimulatedPeer) -> bool:
        presence: Any = one.trainer.member.presence if one.trainer is not None else None
        held = presence and presence._context.backoff._held.get(other.host.peer_id)
        return bool(held) and held.firm and held.until > self._world.loop.time()

    # -- what it keeps

    def _check_bounds(self, peer: SimulatedPeer, boundary: Any) -> None:
        presence, count = boundary.presence, len(self._world.peers)
        members, now = presence._members, self._world.runtime.unix()
        ends = {key: max(entry.expires, members.kept.get(key, 0.0)) for key, entry in members.known.items()}
        stale = [members.known[key].record.name for key, end in ends.items() if end < now - EXPIRED]
        since = max(self._joined[peer.name], math.inf if peer.process is None else peer.process.thawed)
        if stale and since < self._world.loop.time() - 2 * EXPIRED:  # a newcomer did not read while it took the state
            self._world.violation(f"{peer.name} keeps expired records: {', '.join(stale)}")
        sizes = {"peers left out": len(presence._context.backoff._held)}
        if isinstance(presence.matchmaking, GroupMatchmaking):
            sizes["waiting streams"] = len(boundary.exchange.incoming._waiting) + 3  # one of each other peer
            sizes["joined members"] = len(presence.matchmaking._leader._joined)
            sizes["named members"] = len(presence.matchmaking._known._named)
        self._check_donor(peer)
        for what, size in sizes.items():
            if size > count + 2:
                self._world.violation(f"{peer.name} keeps {size} {what}")

    def _check_late(self, peer: SimulatedPeer, waiting: set[tuple[str, str]]) -> None:
        """Streams that nobody takes end with the round: what has waited since the round before is kept for ever."""
        if waiting & self._late.get(peer.name, set()):
            self._world.violation(f"{peer.name} keeps waiting streams of an earlier round")
        self._late[peer.name] = waiting

    def _check_donor(self, peer: SimulatedPeer) -> None:
        """Its places for newcomers are free again some time after the last download."""
        assert peer.trainer is not None
        now, node = self._world.loop.time(), peer.trainer.member.node
        donor = node.served[STATE_PROTOCOL].__self__
        streams = {pipe.protocol for link in peer.host.links.values() for pipe in link.streams}
        if not donor._clients or STATE_PROTOCOL in streams:
            self._busy.pop(peer.name, None)
        elif now - self._busy.setdefault(peer.name, now) > BUSY:
            self._world.violation(f"{peer.name} serves {len(donor._clients)} newcomers, and none is connected")
            del self._busy[peer.name]
