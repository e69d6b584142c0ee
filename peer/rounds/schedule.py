"""How long an inner phase is: H steps, and at the end of a run shorter and shorter ones for methods that meet in pairs.

The replicas of such a method differ by what they have trained since they were averaged. While the learning rate is
high that keeps them apart; at its end a few more swaps bring them together, and every peer leaves with a model close
to the average of all. The last H steps are halved until a phase would be shorter than H / 8: two or three swaps more.
"""

from __future__ import annotations

from math import ceil

from peer.rounds.types import Grouping

SHORTEST = 8  # parts of H


def phase_steps(inner_steps: int, left: float, grouping: Grouping) -> int:
    """Steps of the phase that begins when ``left`` steps of the run (a whole number, or infinitely many) are to be
    done, 0 when none are.
    """
    if left > inner_steps or grouping is not Grouping.PAIR:
        return int(min(inner_steps, left))
    half = ceil(left / 2)
    return half if half * SHORTEST >= inner_steps else int(left)
