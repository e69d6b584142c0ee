"""The state of a peer with a program's own inner loop, for the program's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.config.digest import first_difference, goes_on
from peer.errors import UserError
from peer.logs import get_logger
from peer.outer.method import OuterMethod
from peer.training.outer_state import Counters, OuterState

log = get_logger("outer_loop")

STATE_VERSION = 2
SAVED = {"config", "layout", "step", "counters", "phi"}  # of every method


@dataclass
class OwnSteps:
    """A program's own loop, as its calls tell it."""

    step: int = 0
    loss: Tensor | float | None = None


class OwnState(OuterState):
    """``run``: its canonical text (config/digest.py). ``adopted``: a member's weights have replaced this peer's."""

    def __init__(
        self, outer: OuterMethod, optimizers: Sequence[torch.optim.Optimizer], run: str, *, feedback: bool = False
    ) -> None:
        super().__init__(OwnSteps(), outer, feedback=feedback)
        self._optimizers, self._run = optimizers, run
        self.adopted = False

    def forget(self) -> None:
        """Reset the program's optimizers."""
        self.adopted = True
        if not self._optimizers:
            log.warning("took the weights of a member: the optimizer's moments are of no use; see optimizer=")
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the outer step's vectors, and plain values. θ is not in it: the program saves its model."""
        with self.outer.slow.changing:
            vectors = {name: vector.clone() for name, vector in self.saved_vectors().items()}
            counters = {**vars(self.counters), "lineage": list(self.counters.lineage)}
            return {
                "version": STATE_VERSION,
                "config": self._run,
                "layout": self.outer.slow.layout(),
                "step": self.inner.step,
                "counters": counters,
                **vectors,
            }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`. Raises :class:`UserError` for another run or model."""
        self.require(saved)
        with self.outer.slow.changing:
            self.take_outer(saved)
            self.inner.step = int(saved["step"])
            self.resume_at(saved["counters"])
        self.open_remaining()

    def require(self, saved: Mapping[str, Any]) -> None:
        """Raises :class:`UserError` for another run or model."""
        if objection := self._objection(saved):
            raise UserError(f"OuterLoop: the saved state {objection}")

    def _objection(self, saved: Mapping[str, Any]) -> str:
        if not isinstance(saved, Mapping) or saved.get("version") != STATE_VERSION or not saved.keys() >= SAVED:
            return "is none that OuterLoop.state_dict made, or of another version"
        if saved["config"] != self._run and not goes_on(self._run, str(saved["config"])):
            return f"is of another run: {first_difference(self._run, str(saved['config']))}"
        if saved["layout"] != self.outer.slow.layout():
            return "is of another model: names or shapes of its parameters differ"
        return "" if saved["counters"].keys() == vars(Counters()).keys() else "has other counters than this version"
