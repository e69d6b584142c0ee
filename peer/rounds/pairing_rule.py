"""Who may meet whom, and when: the rule of the swarm and of its simulators. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
LAST_CALL = 0.4  # share of the inner phase that is left when all may be asked but the one met last


MET_LAST = 0.15  # when that one may be asked too


def near(eta: float, their_eta: float, phase: float, their_phase: float, window: float) -> bool:
    """Are two boundaries within ``window`` of the shorter inner phase? All times in seconds."""
    return abs(eta - their_eta) <= window * min(phase, their_phase)


def askable(candidates: Sequence[T], left: float, opens: float) -> Sequence[T]:
    """Those of ``candidates`` that may be asked when ``left`` of the inner phase is left: the first from ``opens`` on,
    later ones later, all but the last from ``LAST_CALL`` on.

    Two peers that leave a swap together have near boundaries from then on; who was met last must not be asked before
    all those have been whose boundaries come near only now. (With 0.15 for all a fifth of the rounds found nobody on
    slow links; with 0.4 for all two peers of one speed met each other half again as often as by chance.)
    """
    count = len(candidates)
    last = [LAST_CALL] * (count - 1) + [MET_LAST if count > 1 else LAST_CALL]
    return [it for place, it in enumerate(candidates) if left <= max(opens * (1 - place / count), last[place])]
