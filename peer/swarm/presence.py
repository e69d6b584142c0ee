"""The swarm as the trainer sees it: join, be found, meet, leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from peer import clock
from peer.config.schema import RendezvousConfig, SwarmRunConfig
from peer.errors import RunError
from peer.logs import fields, get_logger
from peer.p2p.addresses import for_record
from peer.p2p.greeting import MemberNode
from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.speed import SPEED_PROTOCOL, SpeedTests
from peer.process import LoopContext
from peer.rounds.contribution import Averaged
from peer.rounds.state import State
from peer.rounds.transfer_rule import LONGEST_REPEAT_PAUSE, catch_up_limit
from peer.rounds.types import Group, Grouping, Link, Outcome, Seat
from peer.swarm.context import BoundaryClock, OwnCounters, SwarmContext
from peer.swarm.directory.directory import Members
from peer.swarm.directory.records import MemberRecord, Report
from peer.swarm.grouping.matchmaking import GroupMatchmaking
from peer.swarm.healing import STALE_ROUNDS, DivergenceTracker, Origin, Replacement
from peer.swarm.matchmaking import Matchmaking
from peer.swarm.pairing.matchmaking import PairMatchmaking
from peer.swarm.start_together import StartBarrier
from peer.swarm.state_transfer.donor import STATE_PROTOCOL, Donor
from peer.swarm.state_transfer.donors import furthest, usual_step
from peer.swarm.state_transfer.join import STOP_PERIOD, take_from, take_state

log = get_logger("swarm")

RETRY_ROUNDS = 2  # rounds until a peer that could not get weights asks again; twice as many after each failure
RETRY_DOUBLINGS = 6  # at most: 128 rounds
KEPT_PHASES = 4  # inner phases for which a partner stays a candidate without a record


class Presence:
    """One per process. ``grouping`` and ``equal_replicas`` are properties of the method.

    Used by the training thread; :meth:`group_for` also by the helper thread of an overlapped swap, which has returned
    before the training thread calls :meth:`ended`. Any thread reads :attr:`size`.
    """

    def __init__(
        self,
        node: MemberNode,
        run: SwarmRunConfig,
        *,
        grouping: Grouping,
        equal_replicas: bool,
        training: LoopContext,
        counters: OwnCounters,
        step: Callable[[], int],
        report: Callable[[], Report],
        metrics_address: str | None,
        tokens_per_step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``step``, ``report``: for this peer's record. ``tokens_per_step``: of an inner step, 0 when unknown."""
        self._node, self._counters = node, counters
        self._step, self._report, self._metrics_address = step, report, metrics_address
        self.origin, self._divergence = Origin(), DivergenceTracker()
        self._taken = self._failed_takes = self._joins_from = 0
        self._members = Members(node, node.member.run, self._record, self._woke)
        self._context = SwarmContext(
            node,
            self._members,
            BoundaryClock(training.progress),
            training,
            counters,
            run.inner_steps,
            tokens_per_step=tokens_per_step,
            least_rate=run.inner_steps / run.inner_time if run.inner_time else 0.0,
        )
        self.take_state = partial(take_state, self._context)
        self.start_barrier = StartBarrier(self._context, self.announce)
        self.matchmaking = _matchmaking(grouping, self._context, run.rendezvous, self.origin, equal=equal_replicas)
        self._group = Group(0)
        self._announced = False
        self._donor: Donor | None = None

    def replacement(self) -> Replacement | None:
        """The weights that this peer must take before it meets others (healing.py).

        Divergent peers that have taken the weights of this peer's part are met again.
        """
        own, step, others = self._counters.round, self._counters.boundary_step, self.others()
        bounds = self.origin.bounds(own, step, self._context.inner_steps, self._context.boundary.progress.phase_seconds)
        joins_late = self.matchmaking.joins_late and own >= self._joins_from
        late = self.origin.late_to(own, others)
        if joins_late and late:
            why, adopt = "the swarm is older than this peer", not self.origin.since
            return Replacement(why, own + STALE_ROUNDS, adopt=adopt, bounds=bounds)
        if others and not late:
            self.origin.has_caught_up()
        if not self._divergence.suspected:
            return None
        self._forgive(self._divergence.replaced(others))
        ids = self._divergence.larger_part(self._node.peer_id, own, others)
        why = "this peer has nothing in common with the swarm"
        return Replacement(why, -1, adopt=True, ids=ids, bounds=bounds) if ids else None

    def _woke(self, uncounted: float) -> None:
        """This process has stood still. At once: at its boundary this peer would meet a member before it asks for a
        replacement. A group of everyone gives its state itself, within bounds. On the network thread.
        """
        if self.matchmaking.joins_late:
            self.origin.woke(self._counters.round, self._counters.boundary_step)
        else:
            self.origin.slept(uncounted)

    def note_replacement(self, divergent: Collection[str], *, taken: bool) -> None:
        """This peer has ``taken`` the weights of others, or could not get them: then it meets others as before."""
        self._divergence.clear()
        if not taken:
            self._context.boundary.progress.go_on()
            self._failed_takes += 1
            self._joins_from = self._counters.round + RETRY_ROUNDS * 2 ** min(self._failed_takes, RETRY_DOUBLINGS)
            return
        self._taken += 1
        self._failed_takes = self._joins_from = 0
        self._forgive(divergent)
        self.announce()  # the others may meet this peer again

    def _forgive(self, peers: Collection[str]) -> None:
        for peer_id in peers:
            self._context.backoff.forgive(peer_id)

    def others(self, *, since: float = 0.0) -> list[MemberRecord]:
        return self._context.others(since=since)

    def enter(self, snapshot: Callable[[], State], round: int, *, waits: bool = False) -> None:
        """Be found from now on: serve newcomers, announce, meet partners. ``waits``: for others (start_together.py)."""
        self.start_barrier.waits = waits
        self._donor = Donor(snapshot, self._node.proven)
        self._node.call(self._node.serve_members(STATE_PROTOCOL, self._donor.serve), OPEN_TIMEOUT)
        self._node.call(self._node.serve(SPEED_PROTOCOL, SpeedTests(self._node.proven).serve), OPEN_TIMEOUT)
        self._members.start()
        self._announced = True
        self.matchmaking.start(round)

    def announce(self) -> None:
        """Write this peer's record now, if others would learn something from it. Never raises."""
        with contextlib.suppress(TimeoutError, RunError):
            self._members.announce()

    def group_for(self, round: int, ended_phase_number: int | None = None) -> Group:
        """The group that averages at the boundary that ends ``round``: see :meth:`Matchmaking.group_for`."""
        self._group = self.matchmaking.group_for(round, ended_phase_number)
        return self._group

    def without_avoided(self, group: Group) -> Group:
        """``group``, without a partner that this peer avoids since they met: it has judged its last merge meanwhile.
        Of a group of everyone nobody can leave another member out: its leader chose.
        """
        partner = group.links[0] if group.links and group.assembly is None else None
        if partner is None or not self._context.backoff.avoided(partner.peer_id):
            return group
        self._node.spawn(_close(partner))
        return replace(group, links=())

    def call_off(self, reason: str) -> None:
        """Other weights come, perhaps in minutes: nobody waits for this peer at its next boundary, whose time is not
        known before the next inner phase begins or :meth:`note_replacement` says that none have come.
        """
        self._context.boundary.progress.suspend()
        self.matchmaking.call_off(reason)

    def ended(self, averaged: Averaged) -> None:
        """A round's exchange has ended: avoid who made it fail, and note a partner with divergent weights."""
        for culprit in averaged.culprits:
            self.avoid(culprit, averaged.outcome, certain=averaged.certain)
        self.matchmaking.ended(self._group, averaged)
        partner, merged = averaged.partner_id, averaged.outcome is Outcome.MERGED
        if merged:  # all members of the group have done what they had to
            phase_seconds = self._context.boundary.progress.phase_seconds
            for link in self._group.links:
                self._node.proven.add(link.peer_id)
                self._context.backoff.forgive(link.peer_id)  # its group's leader has let it in
                self._members.keep(link.peer_id, KEPT_PHASES * phase_seconds)
            if self._group.assembly is not None:
                members = [seat.peer_id for seat in self._group.assembly.seats]
                self.origin.with_group(self._counters.round, self._step(), members)
        if partner and (merged or averaged.strange):
            chosen, ahead, taken = averaged.chosen, averaged.ahead, self._members.taken_by(partner)
            self._divergence.note(partner, divergent=not merged, chosen=chosen, ahead=ahead, taken=taken)

    def avoid(self, peer_id: str, outcome: Outcome, *, certain: bool = True) -> None:
        """A round failed because of this member: leave it out for a while. A time-out is no offence of one with which
        the last swap succeeded: its line may have failed. Nor is it one if it may have been another member.
        """
        if peer_id != self._node.peer_id:
            offence = certain and (outcome is not Outcome.TIMEOUT or peer_id not in self._node.proven)
            self.matchmaking.avoid(peer_id, offence=offence, late=outcome is Outcome.TIMEOUT)
            self._node.proven.discard(peer_id)

    def state_of(self, donor: Seat, room: Sequence[Tensor], least: int = 0) -> State | None:
        """The verified state of a member of the group in ``room``, or ``None``. ``least``: see :func:`take_from`."""
        phase_seconds, inner_steps = self._context.boundary.progress.phase_seconds, self._context.inner_steps
        own, others, tokens_per_step = self._record(), self.others(), self._context.tokens_per_step()
        most = furthest([*others, own], inner_steps, tokens_per_step)
        state = take_from(self._context, donor, room, catch_up_limit(phase_seconds), most, least)
        if state is None:
            self.matchmaking.gave_no_state(donor.peer_id)
            return None
        usual = max(self._step(), usual_step(own, others, tokens_per_step)) if others else most[1]
        believed = self.origin.group_bounds(others, usual, inner_steps, phase_seconds).nearest(state)
        if believed.step != state.step:
            told = fields(donor=donor.name, said=state.step, step=believed.step)
            log.warning("a step that a member of the group cannot have reached: %s", told)
        return believed

    def refuse_state(self, donor: Seat) -> None:
        """The weights that this member gave as the group's are worse than this peer's own."""
        self._node.proven.discard(donor.peer_id)
        self.matchmaking.gave_no_state(donor.peer_id, worse=True)

    @property
    def peer_id(self) -> str:
        return self._node.peer_id

    @property
    def size(self) -> int:
        """Live members, this peer included."""
        return len(self._members.live()) + 1

    @property
    def failure(self) -> str:
        """Why the network has failed; empty while it works."""
        return self._node.failure

    def stay(self) -> None:
        """Before :meth:`leave`: until those that ask for this peer's weights have them, within a limit."""
        limit = LONGEST_REPEAT_PAUSE + catch_up_limit(self._context.boundary.progress.phase_seconds)
        until, donor = clock.monotonic() + limit, self._donor
        while donor is not None and donor.awaited and not self._context.away and clock.monotonic() < until:
            clock.sleep(STOP_PERIOD)

    def leave(self) -> None:
        """Withdraw this peer's record and close the node. Never raises."""
        if self._announced and not self._node.failure:
            with contextlib.suppress(RunError, TimeoutError):
                self._members.leave()
        self._node.stop()

    def _record(self) -> MemberRecord:
        training = self._context.training
        paused, speed = training.pause.active, training.progress.rate(self._context.tokens_per_step())
        return MemberRecord(
            peer_id=self._node.peer_id,
            name=self._node.member.name,
            addresses=list(for_record(self._node.addresses)),
            config=self._node.member.config,
            state="paused" if paused else "waiting" if self.start_barrier.waits else "training",
            ready=self.start_barrier.ready,
            step=self._step(),
            round=self._counters.round,
            tokens_per_second=0.0 if paused else speed,
            metrics=self._metrics_address,
            report=self._report(),
            root=self.origin.root,
            taken=self._taken,
        )


def _matchmaking(
    grouping: Grouping, context: SwarmContext, settings: RendezvousConfig, origin: Origin, *, equal: bool
) -> Matchmaking:
    """How the members of ``grouping`` find one another. ``equal``: the method's replicas are."""
    if grouping is Grouping.PAIR:
        return PairMatchmaking(context, settings, origin)
    if grouping is Grouping.EVERYONE:
        return GroupMatchmaking(context, settings.patience, equal=equal)
    return Matchmaking()


async def _close(link: Link) -> None:
    if link.stream is not None:
        link.stream.close()
