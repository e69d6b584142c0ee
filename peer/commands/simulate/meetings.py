"""Pairing on the simulated clock: the rule of rounds/pairing_rule.py, for all replicas at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peer.commands.simulate.replica import Replica
from peer.rounds.pairing_rule import NEVER, longest_ago, near
from peer.rounds.types import Outcome


@dataclass
class Arrivals:
    """Boundaries by simulated time. A replica at its boundary, or waiting there for its partner, is not in ``due``."""

    due: dict[Replica, float] = field(default_factory=dict)  # next boundary of each replica that trains
    waiting: dict[Replica, tuple[Replica, float]] = field(default_factory=dict)  # partner, and since when


def choose_pairs(
    arrivals: Arrivals,
    here: Sequence[Replica],
    time: float,
    window: float,
    chance: random.Random,
    avoided: Callable[[Replica, Replica], bool] = lambda one, two: False,
) -> list[tuple[Replica, Replica | None]]:
    """The meetings of now; ``None``: alone. Other replicas of ``here`` wait for a partner that is still training.

    Candidates have their boundary within ``window`` of the shorter inner phase; one of those met longest ago is drawn.
    With an odd number of replicas each is alone in turn.
    """
    meetings: list[tuple[Replica, Replica | None]] = []
    came_for = {expected: host for host, (expected, _) in arrivals.waiting.items()}
    free = [replica for replica in here if replica not in came_for]
    for replica in (replica for replica in here if replica in came_for):
        meetings.append((came_for[replica], replica))
        arrivals.waiting.pop(came_for.pop(replica))
    chance.shuffle(free)
    free.sort(key=lambda replica: -replica.outcomes[Outcome.ALONE])
    if len(free) % 2:
        free.insert(0, free.pop())  # an odd number: the one that was alone least often looks among those still training
    odd = len(free) % 2
    while free:
        first = free.pop(0)
        still = [
            other
            for other, due in arrivals.due.items()
            if other not in came_for and near(due - time, 0.0, other.usual_time, first.usual_time, window)
        ]
        candidates = [other for other in (still if odd else [*free, *still]) if not avoided(first, other)]
        odd = 0
        if not candidates:
            meetings.append((first, None))
            continue
        met = {other: first.met.get(other.name, NEVER) for other in candidates}
        partner = chance.choice(longest_ago(candidates, met.__getitem__))
        if partner in free:
            free.remove(partner)
            meetings.append((first, partner))
        else:
            arrivals.waiting[first] = (partner, time)
            came_for[partner] = first
    return meetings
