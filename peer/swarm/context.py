"""What pairing and grouping have in common: the time of the next boundary, and what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from pydantic import Field

from peer.p2p.greeting import MemberNode
from peer.p2p.stream import Message
from peer.process import LoopContext
from peer.rounds.backoff import PeerBackoff
from peer.rounds.pairing_rule import end_patience
from peer.rounds.progress import Progress
from peer.rounds.state import Lineage
from peer.rounds.transfer_rule import UNSEEN_PHASE_SECONDS
from peer.swarm.directory.directory import Members
from peer.swarm.directory.records import MemberRecord

LONGEST_PHASE_RATIO = 4.0  # of another member's inner phase, by which a round is measured, to this peer's own, at most

Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Decline(Message):
    """No, not now."""

    kind: Literal["decline"] = "decline"
    reason: Annotated[str, Field(max_length=200)]


class BoundaryClock:
    """When this peer reaches its next boundary, as it tells others. Belongs to the network thread."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.here = False
        self.run_ended = False  # this peer has made its last inner step
        self.swaps_ended = False  # and its last swap
        self._left_phase_number = 0  # number of the inner phase whose boundary is over

    @contextmanager
    def at_end_of(self, phase_number: int) -> Iterator[None]:
        """While this peer is at the boundary that ends inner phase ``phase_number``."""
        self.here = True
        try:
            yield
        finally:
            self._left_phase_number = phase_number
            self.here = False

    @property
    def between(self) -> bool:
        """A boundary is over and the next inner phase has not begun: its end is not known yet."""
        return self.progress.phase_number == self._left_phase_number

    @property
    def longest_phase_seconds(self) -> float:
        """Of the longest inner phase that another member is believed to have."""
        return LONGEST_PHASE_RATIO * (self.progress.phase_seconds or UNSEEN_PHASE_SECONDS)

    @property
    def end_patience(self) -> float:
        """Seconds in all for which this peer waits for partners after its last inner step."""
        swap = self.progress.swap_seconds + self.progress.judge_seconds
        return end_patience(swap, self.progress.phase_seconds)

    def eta(self) -> float | None:
        """Seconds until the boundary of the next meeting; ``None`` when it is not known: see :meth:`Progress.eta`.

        After the last inner step a peer is at its boundary unless a swap of its runs. Before the next one it may judge
        the last one for some seconds: others can agree to meet it meanwhile.
        """
        if self.here or (self.run_ended and not self.progress.swapping):
            return 0.0
        between = self.between and not self.progress.suspended
        return self.progress.phase_seconds or None if between else self.progress.eta()


class OwnCounters(Protocol):
    """How far this peer is. The training thread writes it; all threads read it."""

    round: int
    boundary_step: int
    lineage: Lineage


@dataclass(frozen=True)
class SwarmContext:
    """The network, the members, this peer's progress, and the members that are left out for a while."""

    node: MemberNode
    members: Members
    boundary: BoundaryClock
    training: LoopContext
    counters: OwnCounters
    inner_steps: int  # of a round
    backoff: PeerBackoff = field(default_factory=PeerBackoff)
    tokens_per_step: Callable[[], float] = lambda: 0.0  # of an inner step, 0 when unknown
    # The least rate at which any member's step count grows, in steps a second. With run.inner_time a slow member skips
    # steps, so its count grows as fast.
    least_rate: float = 0.0

    def others(self, *, since: float = 0.0) -> list[MemberRecord]:
        """Live members of this configuration that are not paused, by records written after ``since`` (unix seconds)."""
        live = self.members.live(since=since)
        return [it for it in live if it.config == self.node.member.config and it.state != "paused"]

    def rate_of(self, record: MemberRecord) -> float:
        """The rate at which a member's step count grows, in tokens a second."""
        return max(record.tokens_per_second, self.least_rate * self.tokens_per_step())

    def candidates(self) -> list[MemberRecord]:
        """The members of this configuration among :meth:`Members.candidates`. The others would refuse each call."""
        return [it for it in self.members.candidates() if it.config == self.node.member.config]

    @property
    def stopping(self) -> bool:
        return self.training.stop.requested

    @property
    def away(self) -> bool:
        """It was asked to stop, or is paused: it meets nobody."""
        return self.training.away
