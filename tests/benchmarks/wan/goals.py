"""What NoLoCo by default is meant to reach, and what was missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OURS = "noloco_default"


@dataclass(frozen=True)
class Goal:
    """A bound on a figure of NoLoCo by default, in every stage."""

    figure: str
    bound: float
    words: str
    least: bool = False  # the figure is to be at least the bound

    def met(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound


GOALS = (
    Goal("wall_ratio", 1.02, "wall seconds over those of computing alone"),
    Goal("idle_share", 0.02, "idle share of the whole run"),
    Goal("merged_share", 0.95, "share of the rounds that merged", least=True),
    Goal("wire_ratio", 1.15, "bytes on the wire over the payload"),
    Goal("end_swaps", 2.0, "swaps that the end of a run takes"),
)


def missed(result: dict[str, Any]) -> list[str]:
    """A line for each goal that was missed, by stage. A stage without a run of ours misses nothing."""
    return [
        f"{stage}: {goal.words}: {methods[OURS]:.4g}, goal at {'least' if goal.least else 'most'} {goal.bound:g}"
        for goal in GOALS
        for stage, methods in result[goal.figure].items()
        if OURS in methods and not goal.met(methods[OURS])
    ]
