"""Two parts of a swarm that were apart for so long that their weights have nothing in common any more.

A mean of two such models is a bad model, so each part refuses the other's contributions (exchange/guard.py), and by
itself that would never end. One part has to take the other's weights. It is the smaller one that does, so that few
cannot make many give up theirs; of two equal ones it is the one that is less far. Every member finds out for itself to
which it belongs, from its own swaps. Views may differ for a while, and a part may be pulled in two directions; who has
changed sides counts with the other part from then on, so the larger one grows until it is all.

Previous station: exchange/pair.py. Next stations: presence.py, joining.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from peer.swarm.directory.records import MemberRecord

RECENT = 15  # partners that are remembered, as by the guard
TWICE = 2  # swaps with strangers, without a merge with them, before anything follows from them


@dataclass(frozen=True)
class Mark:
    """A partner whose contribution had nothing in common with one's own in the last ``times`` swaps with it."""

    times: int
    ahead: int  # rounds, by what both said in their last swap
    taken: int  # its record's: what is known of it ends when it takes the weights of others


class Strangers:
    """What a peer knows of its last partners. Belongs to the thread that trains."""

    def __init__(self) -> None:
        self._partners: OrderedDict[str, Mark] = OrderedDict()  # newest last

    def note(self, peer_id: str, *, strange: bool, ahead: int = 0, taken: int = 0) -> None:
        """A swap with this partner, ``ahead`` rounds further, has ended; ``taken`` is of its record."""
        before = self._partners.pop(peer_id, None)
        times = before.times if before is not None and before.taken == taken else 0
        self._partners[peer_id] = Mark(times + 1 if strange else 0, ahead, taken)
        while len(self._partners) > RECENT:
            self._partners.popitem(last=False)

    def clear(self) -> None:
        """This peer's weights are others' now, or those could not be had."""
        self._partners.clear()

    def changed(self, others: Sequence[MemberRecord]) -> list[str]:
        """Ids of strangers that have taken the weights of others since. They are none from here on."""
        marks = ((record, self._partners.get(record.peer_id)) for record in others)
        changed = [it.peer_id for it, mark in marks if mark is not None and mark.times and mark.taken != it.taken]
        for peer_id in changed:
            del self._partners[peer_id]
        return changed

    def outnumber(self, peer_id: str, round: int, others: Sequence[MemberRecord]) -> list[str]:
        """Ids of the strangers among the live ``others`` if this peer (``peer_id``, at ``round``) belongs to those who
        give way; else nobody. Who has not been met of late is taken for one of its own part.
        """
        marks = {record.peer_id: self._mark(record, round) for record in others}
        strange = [other for other, mark in marks.items() if mark.times]
        ours = 1 + min(len(others), RECENT) - len(strange)
        if sum(mark.times for mark in marks.values()) < TWICE or len(strange) < ours:
            return []
        theirs = max((marks[other].ahead, other) for other in strange)
        near = [(mark.ahead, other) for other, mark in marks.items() if not mark.times]
        return [] if len(strange) == ours and theirs < max([*near, (0, peer_id)]) else strange

    def _mark(self, record: MemberRecord, round: int) -> Mark:
        mark = self._partners.get(record.peer_id)
        fresh = Mark(0, record.round - round, record.taken)  # the record is some seconds old
        return mark if mark is not None and mark.taken == record.taken else fresh
