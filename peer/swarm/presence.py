"""A peer's whole presence in the swarm, as the trainer sees it: join, be found, meet, leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.config.schema import RendezvousConfig
from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.p2p.addresses import for_record
from peer.p2p.node import Node
from peer.process import Stop
from peer.rounds.contribution import Averaged
from peer.rounds.lineage import Lineage
from peer.rounds.progress import Progress
from peer.rounds.state import State
from peer.rounds.types import Group, Grouping, Outcome, Seat
from peer.swarm.boundary import Boundary
from peer.swarm.context import SwarmContext
from peer.swarm.directory.directory import Members
from peer.swarm.directory.duplicate_identity import LOOK, twin_of
from peer.swarm.directory.records import NO_REPORT, MemberRecord, Report
from peer.swarm.grouping.gathering import Gathering
from peer.swarm.grouping.leader import CATCH_UP
from peer.swarm.healing.divergence import Strangers
from peer.swarm.healing.late_join import Beginning
from peer.swarm.pairing.rendezvous import Rendezvous
from peer.swarm.state_transfer.donor import start_serving
from peer.swarm.state_transfer.download import take_state_of
from peer.swarm.state_transfer.join import take_state

log = get_logger("presence")

LINGER = 0.25  # of an inner phase: looking for a partner beside the inner steps, before going on alone
TWIN_TIMEOUT = LOOK + 60.0  # seconds
AGAIN = 2  # rounds until weights are asked for again that could not be had; twice as many each time
DOUBLINGS = 6
START_PERIOD = 0.5  # seconds between two looks at who has come


@dataclass(frozen=True)
class Vitals:
    """What changes in a peer's record; the swarm's step and round, this peer's tokens/s."""

    step: int
    round: int
    tokens_per_second: float
    report: Report = NO_REPORT


class Presence:
    """One per process. ``grouping`` and ``equal_replicas`` are the method's."""

    def __init__(
        self,
        node: Node,
        *,
        grouping: Grouping,
        equal_replicas: bool,
        settings: RendezvousConfig,
        progress: Progress,
        stop: Stop,
        vitals: Callable[[], Vitals],
        lineage: Callable[[], Lineage],
        metrics_address: str | None,
    ) -> None:
        self._node, self._me = node, node.member
        self._progress, self._stop, self._vitals = progress, stop, vitals
        self._metrics_address = metrics_address
        self.beginning, self._strangers = Beginning(), Strangers()
        self._taken = self._in_vain = self._joins_from = 0
        self._members = Members(node, node.member.run, self._record)
        self._meets: Rendezvous | Gathering | None = None
        footing = SwarmContext(node, self._members, Boundary(progress), stop)
        if grouping is Grouping.PAIR:
            self._meets = Rendezvous(footing, settings, self.beginning)
        elif grouping is Grouping.EVERYONE:
            self._meets = Gathering(footing, settings.patience, lineage, equal=equal_replicas)
        self._announced = self._waits = False

    def require_alone(self) -> None:
        """Raises :class:`UserError` when another process is alive with this peer's identity."""
        twin = self._node.call(twin_of(self._node, self._me.run), TWIN_TIMEOUT)
        if twin is not None:
            raise UserError(
                f"a peer with the same identity is alive: {twin.name} at {', '.join(twin.addresses[:2])}; each peer "
                "needs a key of its own (peer.identity) or an invitation of its own (peer.invitation)"
            )

    def join(
        self,
        room: Sequence[Tensor],
        timeout: float,
        *,
        above: int,
        reached: int = 0,
        among: Collection[str] = (),
        without: Collection[str] = (),
    ) -> State | None:
        """The verified state of a member beyond round ``above``; ``None`` when there is none: :func:`take_state`."""
        return take_state(
            *(self._node, self._members, room, timeout),
            above=above,
            reached=reached,
            among=among,
            without=without,
            stopped=lambda: self._stop.requested,
        )

    def late(self, *, judged: bool) -> bool:
        """There are others that are further, whose weights must be taken before they are met: latecomer.py."""
        own, others = self._vitals().round, [(it.round, it.root) for it in self.others()]
        if not isinstance(self._meets, Rendezvous) or own < self._joins_from:
            return False
        return self.beginning.late_to(own, others, judged=judged)

    def outnumbered_by(self) -> list[str]:
        """Ids of those of whom one's weights must be taken, as they have nothing in common with ours: strangers.py.

        Strangers that have taken those of our part are met again.
        """
        others = self.others()
        self._forgive(self._strangers.changed(others))
        return self._strangers.outnumber(self._node.peer_id, self._vitals().round, others)

    def settle(self, strangers: Collection[str], *, taken: bool) -> None:
        """This peer's weights were replaced by those of others (``taken``), or these could not be had."""
        self._strangers.clear()
        self._taken += taken
        self._in_vain = 0 if taken else self._in_vain + 1
        self._joins_from = 0 if taken else self._vitals().round + AGAIN * 2 ** min(self._in_vain, DOUBLINGS)
        if not taken:
            return
        self._forgive(strangers)
        with contextlib.suppress(TimeoutError, RunError):
            self._members.announce()  # that they may meet us again

    def _forgive(self, peers: Collection[str]) -> None:
        if isinstance(self._meets, Rendezvous):
            self._meets.forgive(peers)

    def others(self) -> list[MemberRecord]:
        """Live members of this configuration."""
        return [record for record in self._members.live() if record.config == self._me.config]

    def enter(self, snapshot: Callable[[], State], round: int, *, waits: bool = False) -> None:
        """Be found from now on: serve newcomers, announce, and meet partners. ``waits``: others are awaited first."""
        self._waits = waits
        start_serving(self._node, snapshot)
        self._members.start()
        self._announced = True
        if self._meets is not None:
            self._meets.start(round)

    def await_others(self, count: int, seconds: float) -> None:
        """Let a swarm begin together: return when ``count`` members are there, when one trains already, or in time."""
        log.info("waiting for others: %s", fields(of=count, seconds=seconds))
        self._wait(count, time.monotonic() + seconds)
        self._waits = False
        with contextlib.suppress(TimeoutError, RunError):
            self._members.announce()  # whoever came last waits for it

    def _wait(self, count: int, until: float) -> None:
        began = time.time()
        while not self._stop.requested:
            with contextlib.suppress(TimeoutError, RunError):  # the directory may answer next time
                self._members.announce()
                self._members.refresh_all()
            fresh = self._members.live(since=began)  # an older record may be of one that was killed
            others = [record for record in fresh if record.config == self._me.config]
            if len(others) + 1 >= count or any(record.state == "training" for record in others):
                return
            if time.monotonic() > until:
                log.warning("begins without all: %s", fields(members=len(others) + 1, of=count))
                return
            time.sleep(START_PERIOD)

    def group_for(self, round: int) -> Group:
        """Who averages with this peer at the boundary that ends ``round``."""
        return self._meets.group_for(round) if self._meets is not None else Group(round)

    def group_beside(self, round: int, phase: int) -> Group:
        """As :meth:`group_for` for a method of pairs, while the inner steps after inner phase ``phase`` go on."""
        assert isinstance(self._meets, Rendezvous)
        return self._meets.group_beside(round, phase, LINGER * (self._progress.phase_seconds or 0.0))

    def ended(self, averaged: Averaged) -> None:
        """A round's exchange: leave out for a while by whom it failed, and remember whose weights are strange."""
        self.avoid(averaged.culprit, averaged.outcome)
        partner, merged = averaged.partner_id, averaged.outcome is Outcome.MERGED
        if partner and (merged or averaged.strange):
            taken = next((record.taken for record in self.others() if record.peer_id == partner), 0)
            self._strangers.note(partner, strange=not merged, ahead=averaged.ahead, taken=taken)

    def avoid(self, peer_id: str, outcome: Outcome) -> None:
        """A round has failed by this member: leave it out for a while."""
        if peer_id in ("", self._node.peer_id):
            return
        if isinstance(self._meets, Gathering):
            self._meets.avoid(peer_id, offence=outcome is not Outcome.TIMEOUT)
        elif isinstance(self._meets, Rendezvous):
            self._meets.avoid(peer_id)

    def state_of(self, donor: Seat, room: Sequence[Tensor]) -> State | None:
        """The verified state of a member of the group, or ``None``; fills ``room``."""
        return take_state_of(self._node, donor, room, CATCH_UP)

    @property
    def peer_id(self) -> str:
        """This peer's own."""
        return self._node.peer_id

    @property
    def size(self) -> int:
        """Live members, this peer included."""
        return len(self._members.live()) + 1

    @property
    def failure(self) -> str:
        """Why the network is gone; empty while it works."""
        return self._node.failure

    def leave(self) -> None:
        """Withdraw this peer's record and close the node. Never raises."""
        if self._announced and not self._node.failure:
            with contextlib.suppress(RunError, TimeoutError):
                self._members.leave()
        self._node.stop()

    def _record(self) -> MemberRecord:
        vitals = self._vitals()
        return MemberRecord(
            peer_id=self._node.peer_id,
            name=self._me.name,
            addresses=list(for_record(self._node.addresses)),
            config=self._me.config,
            state="waiting" if self._waits else "training",
            step=vitals.step,
            round=vitals.round,
            tokens_per_second=vitals.tokens_per_second,
            metrics=self._metrics_address,
            report=vitals.report.model_copy(update={"members": self.size}),
            root=self.beginning.root,
            taken=self._taken,
        )
