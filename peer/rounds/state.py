"""A peer's outer state at a boundary, for transfer to another peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from peer.rounds.lineage import NO_ROUNDS, Lineage


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


Root = Annotated[str, Field(max_length=32)]
