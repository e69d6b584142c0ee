"""The outer half of a peer's state: slow weights, momentum and counters. What trains the fast weights is not in it.

Previous station: outer/. Next stations: state.py, which adds the inner half, and api/state.py, where that is the
user's own; blocking.py and overlapped.py, which change it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peer.outer.method import OuterMethod
from peer.rounds.lineage import NO_ROUNDS, Lineage
from peer.rounds.state import State
from peer.rounds.vectors import parts


class Trained(Protocol):
    """What trains the fast weights. ``step`` is the swarm's."""

    step: int


@dataclass
class Counters:
    """Where a peer is. ``round`` and the inner loop's ``step`` are the swarm's; ``tokens`` is this peer's own."""

    round: int = 0
    tokens: int = 0
    phase_steps_done: int = 0  # inner steps since the last boundary
    phase_tokens: int = 0  # this peer's own since then: the weight of its contribution
    boundary_step: int = 0  # the inner loop's step at the last boundary
    lineage: Lineage = NO_ROUNDS  # the rounds of everyone that the slow weights have in them
    root: str = ""  # drawn by the peer whose fresh weights these were once; swarms that have met have the same one


class OuterState(ABC):
    """Reads and writes the state of the parts it is given."""

    inner: Trained

    def __init__(self, inner: Trained, outer: OuterMethod) -> None:
        self.inner, self.outer = inner, outer
        self.counters = Counters()

    @abstractmethod
    def forget(self) -> None:
        """The weights are another peer's now: the optimizer's moments are of no use for them."""

    def vectors(self) -> list[Tensor]:
        """The outer state that a newcomer needs: φ and, where the method has one, δ. Flat fp32 on the host."""
        momentum = self.outer.momentum
        return [self.outer.slow.phi] if momentum is None else [self.outer.slow.phi, momentum]

    def room(self) -> list[Tensor]:
        """For the vectors of another peer."""
        return [torch.empty_like(vector) for vector in self.vectors()]

    def snapshot(self) -> State:
        """Copies of φ and δ with the counters of the same boundary. Safe to call from any thread."""
        with self.outer.slow.changing():
            return State(
                self.counters.boundary_step,
                self.counters.round,
                [it.clone() for it in self.vectors()],
                lineage=self.counters.lineage,
                phase_steps_done=max(0, self.inner.step - self.counters.boundary_step),
                root=self.counters.root,
            )

    def cross_boundary(self, digest: str = "", members: int = 1) -> None:
        """A round is complete: the counters that belong to the slow weights of now. ``digest``: of what everyone,
        ``members`` peers, averaged in it; peers with the same line of them have the same slow weights.
        """
        if digest:
            self.counters.lineage = self.counters.lineage.after(digest, members)
        self.counters.round += 1
        self.counters.boundary_step, self.counters.phase_steps_done = self.inner.step, 0
        self.counters.phase_tokens = 0

    def postpone_boundary(self) -> None:
        """Another inner phase belongs to the same round."""
        self.counters.boundary_step, self.counters.phase_steps_done = self.inner.step, 0

    def adopt(self, state: State) -> None:
        """Become a newcomer with a member's slow weights: θ = φ, so Δ is zero; the optimizer starts anew.

        It goes on from where the member is between two boundaries, so that both reach the next one together.
        """
        with self.outer.slow.changing():
            self.take_outer(dict(zip(("phi", "momentum"), state.vectors, strict=False)))
            self.outer.slow.write_fast()
            self.forget()
            self._stand_by(state)

    def catch_up(self, state: State) -> None:
        """Take the slow weights of others without losing what was trained since: θ ← φ_theirs + (θ − φ_own).

        Round and step become theirs too, so that all come to the end of the run together. The optimizer goes on.
        """
        slow = self.outer.slow
        change = torch.empty(slow.numel)
        slow.read_fast(0, change)
        change.sub_(slow.phi)
        with slow.changing():
            self.take_outer(dict(zip(("phi", "momentum"), state.vectors, strict=False)))
            slow.write_fast()
            slow.add_to_fast(change)
            self._stand_by(state)

    @contextmanager
    def trying(self, phi: Tensor) -> Iterator[None]:
        """θ is ``phi`` (flat fp32, host), up to rounding, for an evaluation; then again what it was."""
        slow = self.outer.slow
        theta = torch.empty(slow.numel)
        slow.read_fast(0, theta)
        for start, stop in parts(slow.numel):
            slow.add_to_fast(phi[start:stop] - theta[start:stop], start)
        try:
            yield
        finally:
            slow.write_fast()
            for start, stop in parts(slow.numel):
                slow.add_to_fast(theta[start:stop] - slow.phi[start:stop], start)

    def take_outer(self, vectors: dict[str, Tensor]) -> None:
        """φ ← ``vectors["phi"]``, and δ the same way; θ stays."""
        with self.outer.slow.changing():
            self.outer.slow.phi.copy_(vectors["phi"])
            if self.outer.momentum is not None:
                self.outer.momentum.copy_(vectors["momentum"])

    def _stand_by(self, state: State) -> None:
        self.inner.step = state.step + state.phase_steps_done
        self.counters.round, self.counters.boundary_step = state.round, state.step
        self.counters.phase_steps_done, self.counters.lineage = state.phase_steps_done, state.lineage
        self.counters.root = state.root
