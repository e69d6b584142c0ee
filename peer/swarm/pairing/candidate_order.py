"""In which order members are asked to meet. Belongs to the network thread."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

from peer import clock
from peer.rounds.pairing_rule import NEVER, in_order
from peer.rounds.types import Newest
from peer.swarm.directory.records import LIFETIME, MemberRecord
from peer.swarm.pairing.agreement import Agreement

# Rounds in which members that were never met are asked last, after one of them has cost time; twice as many after each
# further time, at most so often
NEW_LAST_ROUNDS, NEW_LAST_DOUBLINGS = 4, 4
MANY_DECLINE = 6  # members never met, in one round; a few do because they have a meeting
KEPT_TRIED = 1000  # members
OFTEN_ROUNDS = 2  # times the members that can be met: so many of the last rounds say how often one was met


class CandidateOrder:
    """What this peer knows of those that it has asked. ``agreement``: has the number of the round."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._met: dict[str, int] = {}  # the round in which a partner was met last
        self._partners = deque[str](maxlen=OFTEN_ROUNDS * KEPT_TRIED)  # the last ones
        self._tried = Newest[int](KEPT_TRIED)  # the round, before this one, in which a member was asked last
        self._asked: dict[str, float] = {}  # time of this round's last proposal to each peer
        self._silent: dict[str, float] = {}  # time at which a peer has not answered
        self._new_last_until = 0  # the round before which members that were never met are asked last
        self._in_vain = 0  # how often they have cost time since one was met

    def of(self, members: Sequence[MemberRecord]) -> list[MemberRecord]:
        """``members`` in the order in which they are asked; last, as each costs seconds, those silent of late.

        A member counts as met in the round in which it was asked in vain: who declines costs time as well. Members that
        were never met come first, but not for some rounds after one of them was silent, or many have declined in a
        round without a partner: others may fill the directory with members that do not exist or meet nobody.
        """
        since = clock.monotonic() - LIFETIME
        self._silent = {peer_id: when for peer_id, when in self._silent.items() if when > since}
        new_last = self._agreement.round < self._new_last_until

        def order(it: MemberRecord) -> tuple[bool, bool, int]:
            met, tried = self.met_in(it.peer_id), self._tried.get(it.peer_id, NEVER)
            return it.peer_id in self._silent, new_last and met == NEVER, max(met, tried)

        return in_order(members, order)

    def met_in(self, peer_id: str) -> int:
        """The round in which it was met last."""
        return self._met.get(peer_id, NEVER)

    def asked_at(self, peer_id: str, otherwise: float = -math.inf) -> float:
        """The time of this round's last proposal to it. Nobody is asked again before all others: else a fast peer would
        ask the same slow ones for ever.
        """
        return self._asked.get(peer_id, otherwise)

    def asks(self, peer_id: str) -> None:
        self._asked[peer_id] = clock.monotonic()

    def met(self, peer_id: str) -> None:
        """It was met at this boundary: from now on others come first."""
        self._in_vain = self._in_vain if peer_id in self._met else 0
        self._met[peer_id] = self._agreement.round
        self._partners.append(peer_id)

    def met_often(self, peer_id: str, others: int) -> bool:
        """Was it met more than twice as often of late as its turn was, where ``others`` could be met too? It may
        propose to all before anybody else does, and be everybody's partner.
        """
        recent = itertools.islice(reversed(self._partners), OFTEN_ROUNDS * (others + 1))
        return sum(it == peer_id for it in recent) > 2 * OFTEN_ROUNDS

    def answers(self, peer_id: str) -> None:
        """It is not silent any more."""
        self._silent.pop(peer_id, None)

    def note_silence(self, peer_id: str, *, silent: bool = True) -> None:
        """Its answer has not come, or came so late that it has cost time; not ``silent``: it could not be reached."""
        if peer_id not in self._met:
            self._ask_new_last()
        if silent:
            self._silent[peer_id] = clock.monotonic()

    def end_round(self, round: int) -> None:
        if round not in self._met.values() and len(self._asked.keys() - self._met.keys()) >= MANY_DECLINE:
            self._ask_new_last()
        for peer_id in self._asked:
            self._tried[peer_id] = round
        self._asked = {}

    def _ask_new_last(self) -> None:
        round = self._agreement.round
        self._in_vain += round >= self._new_last_until
        self._new_last_until = round + NEW_LAST_ROUNDS * 2 ** min(max(self._in_vain - 1, 0), NEW_LAST_DOUBLINGS)
