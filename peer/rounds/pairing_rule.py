"""Which peers may form a pair, and when: the rule of the swarm (swarm/pairing) and of both simulators. Pure.

A peer looks for a partner from a random time of its inner phase on. It asks peers whose boundary is near its own, the
one met longest ago first, at random among equals, because weights mix faster so. At its boundary it takes any peer that
is ready.

A peer that has made the last inner step of its run meets only peers that have made theirs, each of them once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Candidate = TypeVar("Candidate")
OPENS = (0.3, 0.8)  # share of the inner phase that is left when the search for a partner starts, at random
PROPOSAL_PAUSE = (0.005, 0.03)  # inner phases between two of its proposals, drawn at random
AT_BOUNDARY = 0.1  # the window of a peer that is at its boundary without a partner
LAST_CALL = 0.4  # share of the inner phase that is left when all but the one met last may be asked
MET_LAST = 0.15  # when that one may be asked too
END_PATIENCE = 5.0  # seconds in all for which a peer waits for partners after its last inner step, at least
NEVER = -1  # the round of the last meeting when there was none


def near(eta: float, their_eta: float, phase_seconds: float, their_phase_seconds: float, window: float) -> bool:
    """Are two boundaries within ``window`` of the shorter inner phase? All times in seconds."""
    return abs(eta - their_eta) <= window * min(phase_seconds, their_phase_seconds)


def longest_ago(candidates: Iterable[Candidate], met: Callable[[Candidate], int]) -> list[Candidate]:
    """The ``candidates`` met longest ago; ``met``: the round of the last meeting, or ``NEVER``."""
    rounds = [(met(it), it) for it in candidates]
    first = min(round for round, _ in rounds)
    return [it for round, it in rounds if round == first]


def in_order(candidates: Iterable[Candidate], met: Callable[[Candidate], Any]) -> list[Candidate]:
    """All ``candidates``, those with the least ``met`` first (for example met longest ago), at random among equals."""
    shuffled = list(candidates)
    random.shuffle(shuffled)
    return sorted(shuffled, key=met)


def askable(candidates: Sequence[Candidate], left: float, opens: float) -> Sequence[Candidate]:
    """The ``candidates`` that may be asked when ``left`` of the inner phase is left: the first from ``opens`` on, later
    ones later, all but the last from ``LAST_CALL`` on.

    Two peers that leave a swap together have near boundaries afterwards. So the peer met last is asked after those
    whose boundaries come near later. (With 0.15 for all, a fifth of the rounds on slow links had no partner; with 0.4
    for all, two peers of one speed met 1.5 times as often as by chance.)
    """
    count = len(candidates)
    last = [LAST_CALL] * (count - 1) + [MET_LAST if count > 1 else LAST_CALL]
    return [it for place, it in enumerate(candidates) if left <= max(opens * (1 - place / count), last[place])]


def last_swaps(members: int, merged: bool) -> int:
    """Plain means of a peer after its last inner step: each halves the replicas' mean square distance from their mean.

    ``members``: this peer and those that have ended or soon will. ``merged``: its last round has merged. That round
    counts as one of log2 ``members``. Momentum and a γ below 1 leave a part of each difference there, so at least one
    plain mean follows. (Four and eight replicas, two seeds: the mean of their losses is 0.005 to 0.02% above the loss
    of their average; if that round did not count, at most 0.004%.)
    """
    swaps = math.ceil(math.log2(max(members, 1)))
    return max(swaps - merged, min(swaps, 1))


def end_patience(swap_seconds: float, phase_seconds: float) -> float:
    """Seconds in all for which a peer waits for partners after its last inner step. ``swap_seconds``: of its last swap,
    with the time to judge it.

    Of an odd number of peers one is left over at the last boundary: it waits until the others have made that swap. A
    partner may draw a swap out, so it waits for no longer than a phase.
    """
    return max(END_PATIENCE, min(1.5 * swap_seconds, phase_seconds))


def ends_soon(tokens_left: float, rate: float, said: float, patience: float) -> bool:
    """May a peer that has said, at most ``said`` seconds ago, that it has ``tokens_left`` end within ``patience``?"""
    return tokens_left <= rate * (said + patience)
