"""A peer's outer state at a boundary, for transfer to another peer, and which averages of everyone it contains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor

from peer.rounds.types import Count

MAX_MEMBERS = 256  # of a group

ROOT_BYTES = 8
# of fresh weights (swarm/healing.py), in hex: the smallest one becomes everybody's, and has to fit into all records
Root = Annotated[str, Field(pattern=rf"^[0-9a-f]{{0,{2 * ROOT_BYTES}}}$")]


class Lineage(NamedTuple):
    """Equal replicas with the same ``digest`` have had the same averages of everyone, in the same order; others with it
    began with the same weights. ``contributions``: how many the averages contain; of two lineages the one with more
    contains more work.
    """

    digest: Annotated[str, Field(max_length=64)] = ""
    contributions: Count = 0

    def fits(self, round: int) -> bool:
        """Can a peer that begins ``round`` have it?"""
        return self.contributions <= MAX_MEMBERS * round

    def after(self, digest: str, members: int) -> Lineage:
        """One more round, whose average of ``members`` peers has this digest."""
        line = hashlib.sha256((self.digest + digest).encode()).hexdigest()[:32]
        return Lineage(line, self.contributions + members)


NO_ROUNDS = Lineage()


def witnessed(digest: str, lineages: Sequence[Lineage]) -> int:
    """The contributions that more than a third of the ``lineages`` with any have at least, and with this ``digest``."""
    trained = [it for it in lineages if it.contributions]
    done = sorted((it.contributions if it.digest == digest else 0 for it in trained), reverse=True)
    return done[len(done) // 3] if done else 0


@dataclass(frozen=True)
class State:
    """A peer's outer state at a boundary, ``phase_steps_done`` inner steps ago; ``vectors``: flat fp32, host.

    ``donor``: the id of the sender.
    """

    step: int
    round: int
    vectors: Sequence[Tensor]
    lineage: Lineage = NO_ROUNDS
    phase_steps_done: int = 0
    root: str = ""
    donor: str = ""
