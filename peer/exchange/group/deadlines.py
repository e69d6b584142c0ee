"""How long the members of a group wait for one another in a round. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from peer.p2p.deadline import THREAD_GRACE

ACCUSATIONS = 1.0  # seconds for further reports after the first one of a failure


@dataclass(frozen=True)
class RoundDeadlines:
    """All in seconds. ``stall``: a member that is silent for so long is given up; ``limit``: for the work of each
    member, at least four stalls (rounds/transfer_rule.py).

    The limit may be hours. So what a silent member costs depends on how long this peer's own work took.
    """

    stall: float
    limit: float

    def until_said(self, took: float, *, failed: bool, by_leader: bool = False) -> float:
        """From the end of this peer's work, which ``took`` so long, until another member must have said something: a
        member its report, or the leader its verdict.

        A slower member may need as long again. The leader waits so long for each report, and its own work may end a
        little (half of :attr:`accusations`) after this peer's: its verdict comes later. When the work has ``failed``, a
        stall is enough: the leader decides within :attr:`accusations`.
        """
        if failed:
            return self.stall
        return took + self.stall + (self.accusations if by_leader else 0.0)

    @property
    def accusations(self) -> float:
        """From the first report of a failure until the leader decides: at most half of the stall that a failed member
        waits for the verdict.
        """
        return min(ACCUSATIONS, self.stall / 2)

    @property
    def latest(self) -> float:
        """From the beginning of the round until another member must have said something, if the work takes the limit.

        This decides only when the work took longer: the process was frozen, or a thread had to end first.
        """
        return 2 * self.limit + self.stall

    @property
    def longest(self) -> float:
        """The whole round. The leader sends its verdict within a stall; the streams close within the grace."""
        return self.latest + self.stall + THREAD_GRACE
