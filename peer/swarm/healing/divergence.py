"""Two parts of a swarm that were apart for so long that their weights have nothing in common any more.

A mean of two such models is a bad model, so each part refuses the other's contributions (exchange/guard.py), and by
itself that would never end. One part has to take the other's weights. It is the smaller one that does, so that few
cannot make many give up theirs; of two equal ones it is the one that is less far. Every member finds out for itself to
which it belongs, from its own swaps. Views may differ for a while, and a part may be pulled in two directions; who has
changed sides counts with the other part from then on, so the larger one grows until it is all.

Previous station: exchange/pair. Next station: presence.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from peer.swarm.directory.records import MemberRecord

REMEMBERED_PARTNERS = 15  # as by the guard
MIN_DIVERGENT_SWAPS = 2  # without a merge between them, before anything follows from them


@dataclass(frozen=True)
class DivergentSwaps:
    """The last ``times`` swaps with a partner, in which the contributions had nothing in common."""

    times: int
    ahead: int  # rounds, by what both said in their last swap
    taken: int  # its record's: what is known of it ends when it takes the weights of others


class DivergenceTracker:
    """What a peer knows of its last partners. Belongs to the thread that trains."""

    def __init__(self) -> None:
        self._partners: OrderedDict[str, DivergentSwaps] = OrderedDict()  # newest last

    def note(self, peer_id: str, *, divergent: bool, ahead: int = 0, taken: int = 0) -> None:
        """A swap with this partner, ``ahead`` rounds further, has ended; ``taken`` is of its record."""
        before = self._partners.pop(peer_id, None)
        times = before.times if before is not None and before.taken == taken else 0
        self._partners[peer_id] = DivergentSwaps(times + 1 if divergent else 0, ahead, taken)
        while len(self._partners) > REMEMBERED_PARTNERS:
            self._partners.popitem(last=False)

    def clear(self) -> None:
        """This peer's weights are others' now, or those could not be had."""
        self._partners.clear()

    def replaced(self, others: Sequence[MemberRecord]) -> list[str]:
        """Ids of divergent partners that have taken the weights of others since. They are none from here on."""
        swaps = ((record, self._partners.get(record.peer_id)) for record in others)
        replaced = [it.peer_id for it, last in swaps if last is not None and last.times and last.taken != it.taken]
        for peer_id in replaced:
            del self._partners[peer_id]
        return replaced

    def larger_part(self, peer_id: str, round: int, others: Sequence[MemberRecord]) -> list[str]:
        """Ids of the divergent peers among the live ``others`` if this peer (``peer_id``, at ``round``) belongs to the
        part that gives way; else none. A peer that was not met of late is taken for one of its own part.
        """
        swaps = {record.peer_id: self._swaps_with(record, round) for record in others}
        divergent = [other for other, last in swaps.items() if last.times]
        ours = 1 + min(len(others), REMEMBERED_PARTNERS) - len(divergent)
        if sum(last.times for last in swaps.values()) < MIN_DIVERGENT_SWAPS or len(divergent) < ours:
            return []
        theirs = max((swaps[other].ahead, other) for other in divergent)
        near = [(last.ahead, other) for other, last in swaps.items() if not last.times]
        return [] if len(divergent) == ours and theirs < max([*near, (0, peer_id)]) else divergent

    def _swaps_with(self, record: MemberRecord, round: int) -> DivergentSwaps:
        last = self._partners.get(record.peer_id)
        fresh = DivergentSwaps(0, record.round - round, record.taken)  # the record is some seconds old
        return last if last is not None and last.taken == record.taken else fresh
