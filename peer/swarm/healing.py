"""When a peer that trains must take the weights of others: late join and divergence (README.md). Rules only.

*Late join.* A mean with the weights of a peer that comes late would set the swarm back. But other peers may have begun
with it. Therefore fresh weights have a *root*: the peer that begins with them draws it at random and gives it to those
that take its weights. Two peers that meet agree on the smaller of their roots, so a swarm soon has one, and both parts
keep it after a split. A peer's former roots count as its own: its part may not know of the smaller one yet.

*Divergence.* The smaller part takes the other's weights, so that few members cannot make many give up theirs. Members
may disagree for a while about which part that is. A member that has taken the weights of the other part counts with
that part, so the larger one grows until it is the whole swarm.

In a small swarm each member counts once. Of a larger one a peer knows only its last partners, and hostile members could
be most of them: they propose before others do, and new ids are asked first. Therefore only those count there that this
peer has chosen itself, and that were not new to it.

*Position.* A small open swarm can have more hostile ids than honest members, so what most say is no proof. A step that
is too high ends a run, one that is too low repeats it. A peer that has met others bounds both by its own clock. A
member of a group of everyone, which often takes the group's position from one other member, does so too. After a split
the weights that count are those with most contributions, and these may have fewer rounds. There it goes back as far as
the records of most members with which it has ever merged say, but never behind the last merge with these. Ids that it
has not merged with cost nothing, so their records count only before its first merge.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Protocol

from peer import clock
from peer.rounds.state import State
from peer.rounds.types import Newest
from peer.swarm.directory.records import MemberRecord

STALE_ROUNDS = 2  # so few rounds behind, a peer keeps its own weights: a state costs as much as two swaps
REMEMBERED_PARTNERS = 15  # as many as the guard
MIN_DIVERGENT_SWAPS = 2  # without a merge between them, before a peer acts on them
EARLIER_PARTNERS = 1000  # ids, also of members of groups
KEPT_ROOTS = 16
PACE_RATIO = 2  # times its own pace, a peer believes, was that of the others since it began


@dataclass(frozen=True)
class PositionBounds:
    """The rounds and the steps, first and last, between which a peer takes the position of others."""

    rounds: tuple[float, float] = (0, math.inf)
    steps: tuple[float, float] = (0, math.inf)

    def nearest(self, state: State) -> State:
        """``state``, at the nearest position between these; at a boundary if it is another one."""
        round = int(min(max(state.round, self.rounds[0]), self.rounds[1]))
        step = int(min(max(state.step, self.steps[0]), self.steps[1]))
        if (round, step) == (state.round, state.step) and step + state.phase_steps_done <= self.steps[1]:
            return state
        return replace(state, round=round, step=step, phase_steps_done=0)


@dataclass(frozen=True)
class Replacement:
    """The weights that this peer must take. Only the members in ``ids`` are asked, if there are any."""

    why: str
    above: int  # the weights must be of a later round
    adopt: bool  # this peer does not keep its own change
    ids: Collection[str] = ()
    bounds: PositionBounds = PositionBounds()


class Position(Protocol):
    """What a peer says of itself, in its record or in a proposal."""

    @property
    def round(self) -> int: ...

    @property
    def root(self) -> str: ...


class Origin:
    """How this peer began. Written by the training thread, and by the network thread when it meets a peer or wakes."""

    def __init__(self) -> None:
        self.root, self.since, self._step, self._time = "", 0, 0, clock.monotonic()
        self._alone = self._slept = self._others_no_better = self._met = False
        self._merged_at = Newest[tuple[int, int]](EARLIER_PARTNERS)  # round and step of the last merge of everyone
        self._roots: tuple[str, ...] = (self.root,)  # that these weights had, and have: the newest last

    def note(self, *, alone: bool, taken: bool, round: int, step: int, root: str) -> None:
        """It has looked for others, and perhaps ``taken`` the weights of one. ``round`` and ``step``: its own, 0 when
        its weights are fresh.
        """
        self.root, self.since, self._alone, self._others_no_better, self._met = root, round, alone, False, taken
        self._step, self._time, self._roots = step, clock.monotonic(), (root,)
        self._slept = False
        self._merged_at.clear()

    def woke(self, round: int, step: int) -> None:
        """This process has stood still: others have trained on, and its clock does not say how far they can be."""
        self.note(alone=True, taken=False, round=round, step=step, root=self.root)
        self._slept = True

    def slept(self, seconds: float) -> None:
        """This member of a group of everyone has slept for ``seconds`` that its clock did not count."""
        self._time -= seconds

    def has_caught_up(self) -> None:
        """Most of the others are not ahead of it. Before that, whom it meets may have slept too."""
        self._slept = False

    def bounds(self, round: int, step: int, inner_steps: int, phase_seconds: float) -> PositionBounds:
        """Where this peer, now at ``round`` and ``step``, can be put by others: not back, and not beyond what they can
        have done since it began, at :data:`PACE_RATIO` times its pace. Who has met nobody yet believes them, as a
        newcomer does.
        """
        if not self._met or not phase_seconds:
            return PositionBounds()
        phases = PACE_RATIO * (clock.monotonic() - self._time) / phase_seconds
        most = max(round, self.since + phases), max(step, self._step + phases * inner_steps)
        return PositionBounds((round, most[0]), (step, most[1]))

    def with_group(self, round: int, step: int, members: Collection[str]) -> None:
        """It has merged at this position with its group, which has these ``members``."""
        self.since, self._step, self._time, self._met = round, step, clock.monotonic(), True
        for peer_id in members:
            self._merged_at[peer_id] = round, step

    def group_bounds(
        self, others: Sequence[MemberRecord], usual: float, inner_steps: int, phase_seconds: float
    ) -> PositionBounds:
        """Where its group can be: not behind the position of their last merge, or, as after a split, of most of the
        ``others`` that it has merged with, if these are behind it; its step not beyond what :meth:`bounds` says, or the
        phase after what is ``usual``: where the group waited for this peer, it is faster without it.
        """
        bounds = self.bounds(self.since, self._step, inner_steps, phase_seconds)
        last = bounds.rounds[0], bounds.steps[0]
        known = [it for it in others if it.peer_id in self._merged_at or not self._merged_at]
        reached = [last, *(self._reached(it, inner_steps) for it in known)]
        round, step = map(median_low, zip(*reached, strict=True))
        steps = min(step, last[1]), max(bounds.steps[1], usual + inner_steps)
        return PositionBounds((min(round, last[0]), math.inf), steps)

    def _reached(self, record: MemberRecord, inner_steps: int) -> tuple[int, int]:
        """The last boundary of a member, at least. It has been at that of its last merge with this peer, however old
        its record is: else one member could give the group's position as that of some seconds ago, again and again.
        """
        round, step = self._merged_at.get(record.peer_id, (0, 0))
        return max(record.round, round), max(record.step - inner_steps, step)

    def met(self, root: str) -> None:
        """It has met a peer with this root; their weights will be averaged."""
        self.root, self._alone, self._met = min(self.root or root, root or self.root), self._slept, not self._slept
        if self.root not in self._roots:
            self._roots = (*self._roots, self.root)[-KEPT_ROOTS:]

    def others_are_no_better(self) -> None:
        """Weights that are rounds further are no better: both are averaged, as after a split."""
        self._others_no_better = True

    def late(self, own: int, theirs: int, root: str) -> bool:
        """Does this peer, at round ``own``, gain more than it loses with the weights of a peer at round ``theirs``?

        A peer that has trained longer by itself has as much to give: then both are averaged, as after any split.
        """
        apart = not self._others_no_better and (self._alone or root not in self._roots)
        return apart and theirs - own > max(STALE_ROUNDS, own - self.since)

    def late_to(self, own: int, others: Sequence[Position]) -> bool:
        """The same for a swarm: to most of its members, as some may claim a round that nobody has."""
        return 2 * sum(self.late(own, it.round, it.root) for it in others) > len(others)


@dataclass(frozen=True)
class DivergentSwaps:
    """The last ``times`` swaps with a partner, in which the contributions had nothing in common."""

    times: int
    ahead: int  # rounds, as both said in their last swap
    taken: int  # of its record: a partner that has taken the weights of others since is a new one
    own_choice: bool = False  # this peer had proposed one of them, and the partner was not new


class DivergenceTracker:
    """What a peer knows of its last partners. Belongs to the training thread."""

    def __init__(self) -> None:
        self._partners: OrderedDict[str, DivergentSwaps] = OrderedDict()  # newest last
        self._known: deque[str] = deque(maxlen=EARLIER_PARTNERS)

    def note(self, peer_id: str, *, divergent: bool, chosen: bool = False, ahead: int = 0, taken: int = 0) -> None:
        """A swap with this partner has ended. ``chosen``: this peer had proposed it. The partner is ``ahead`` rounds
        further; ``taken`` is from its record.
        """
        before = self._partners.pop(peer_id, None)
        if before is None or before.taken != taken or bool(before.times) is not divergent:
            before = DivergentSwaps(0, ahead, taken)
        own_choice = before.own_choice or (chosen and peer_id in self._known)
        self._partners[peer_id] = DivergentSwaps(before.times + divergent, ahead, taken, own_choice)
        ids = [it for it, last in self._partners.items() if last.own_choice is own_choice]
        for old in ids[:-REMEMBERED_PARTNERS]:
            del self._partners[old]
        if peer_id not in self._known:
            self._known.append(peer_id)

    @property
    def suspected(self) -> bool:
        """A recent partner had nothing in common with this peer."""
        return any(last.times for last in self._partners.values())

    def clear(self) -> None:
        """This peer has taken the weights of others, or could not get them."""
        self._partners.clear()

    def replaced(self, others: Sequence[MemberRecord]) -> list[str]:
        """Forget divergent partners that have taken the weights of others since; returns their ids."""
        swaps = ((record, self._partners.get(record.peer_id)) for record in others)
        replaced = [it.peer_id for it, last in swaps if last is not None and last.times and last.taken != it.taken]
        for peer_id in replaced:
            del self._partners[peer_id]
        return replaced

    def larger_part(self, peer_id: str, round: int, others: Sequence[MemberRecord]) -> list[str]:
        """Ids of the divergent peers among the live ``others`` if this peer (``peer_id``, at ``round``) must take their
        weights; otherwise none. A peer that is not among the last partners counts with this peer's part. Of two equal
        parts the one that says to be further decides, in a small swarm.
        """
        small = len(others) <= REMEMBERED_PARTNERS
        swaps = {record.peer_id: self._swaps_with(record, round) for record in others}
        divergent = [other for other, last in swaps.items() if last.times and (small or last.own_choice)]
        ours = 1 + min(len(others), REMEMBERED_PARTNERS) - len(divergent)
        if sum(swaps[it].times for it in divergent) < MIN_DIVERGENT_SWAPS or len(divergent) < ours + (not small):
            return []
        theirs = max((swaps[other].ahead, other) for other in divergent)
        near = [(last.ahead, other) for other, last in swaps.items() if not last.times]
        return [] if len(divergent) == ours and theirs < max([*near, (0, peer_id)]) else divergent

    def _swaps_with(self, record: MemberRecord, round: int) -> DivergentSwaps:
        last = self._partners.get(record.peer_id)
        fresh = DivergentSwaps(0, record.round - round, record.taken)  # the record is some seconds old
        return last if last is not None and last.taken == record.taken else fresh
