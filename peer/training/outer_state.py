"""The outer half of a peer's state: slow weights, momentum and counters.

state.py adds the inner half. api/state.py is for a program with an inner half of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo, PartOpening
from peer.rounds.contribution import as_bytes, host_vector, parts
from peer.rounds.state import NO_ROUNDS, Lineage, State
from peer.rounds.types import Grouping


class Trained(Protocol):
    """The inner loop."""

    step: int  # of the swarm
    loss: Tensor | float | None  # of the last step, nats a token; ``None`` when unknown


@dataclass
class Counters:
    """A peer's position. ``round`` is the swarm's; ``tokens`` are this peer's own.

    ``round``: rounds that are complete, so the number of the one that runs, from 0 (on the wire and in ``Group``). Log
    lines and ``rounds.jsonl`` number a round when it is complete, from 1.
    """

    round: int = 0
    tokens: int = 0
    phase_steps_done: int = 0  # inner steps of this inner phase: a postponed boundary begins a new one
    # Of this round, which may have several inner phases: the weight of its contribution. A checkpoint has this name.
    phase_tokens: int = 0
    boundary_step: int = 0  # the inner loop's step when this inner phase began
    unopened: int | None = None  # first element without the outer step of the phase that ended there; None: all have it
    lineage: Lineage = NO_ROUNDS  # the group rounds that changed the slow weights
    root: str = ""  # random id of the fresh weights; equal in swarms that have met

    def add(self, steps: int, tokens: int) -> None:
        self.tokens += tokens
        self.phase_tokens += tokens
        self.phase_steps_done += steps


class OuterState(ABC):
    """Reads and writes the outer method's state."""

    inner: Trained

    def __init__(self, inner: Trained, outer: OuterMethod, *, feedback: bool = False) -> None:
        self.inner, self.outer = inner, outer
        self.kept = outer.slow.zeros() if feedback else None  # what rounding has kept back (exchange/group/feedback.py)
        self.counters = Counters()
        if outer.grouping is Grouping.EVERYONE:  # peers with different initial weights first take the same ones
            self.counters.lineage = Lineage(self._fingerprint())
        self.replaced = 0  # times that other weights have replaced these

    @abstractmethod
    def forget(self) -> None:
        """Reset the optimizer: its moments do not fit the weights of another peer."""

    def named_vectors(self) -> dict[str, Tensor]:
        """The outer state that a newcomer needs: φ and, where the method has one, δ. Flat fp32 on the host."""
        phi, momentum = self.outer.slow.phi, self.outer.momentum
        return {"phi": phi} if momentum is None else {"phi": phi, "momentum": momentum}

    def saved_vectors(self) -> dict[str, Tensor]:
        """The same, and what only this peer's own checkpoints have."""
        return self.named_vectors() if self.kept is None else {**self.named_vectors(), "kept": self.kept}

    def vectors(self) -> list[Tensor]:
        """:meth:`named_vectors` without the names."""
        return list(self.named_vectors().values())

    def room(self) -> list[Tensor]:
        """Buffers for the vectors of another peer."""
        return [torch.empty_like(vector) for vector in self.vectors()]

    def snapshot(self) -> State:
        """Copies of φ and δ with the counters of the same boundary. Call it from any thread."""
        with self.outer.slow.changing:
            done = max(0, self.inner.step - self.counters.boundary_step)
            return State(
                self.counters.boundary_step,
                self.counters.round,
                [it.clone() for it in self.vectors()],
                lineage=self.counters.lineage,
                phase_steps_done=done,
                root=self.counters.root,
            )

    def cross_boundary(self, digest: str = "", members: int = 1) -> None:
        """A round is complete. ``digest``: of the mean of all ``members`` of a group."""
        if digest:
            before = self.counters.lineage
            after = before.after(digest, members)
            if not self.outer.equal_replicas:  # they keep the digest of the weights that they began with
                after = after._replace(digest=before.digest)
            self.counters.lineage = after
        self.counters.round += 1
        self.counters.phase_tokens = 0
        self.begin_phase()

    def resume_at(self, saved: Mapping[str, Any]) -> None:
        """Restore the counters. A checkpoint has other values beside them, and an older version's lacks some."""
        for key in vars(self.counters).keys() & saved.keys():
            setattr(self.counters, key, saved[key])
        self.counters.lineage = Lineage(*saved["lineage"])

    def open_remaining(self) -> None:
        """After a restore: the elements that had no outer step yet take it, in a group of this peer alone. A checkpoint
        cannot know whether a partner has the phase's change since.
        """
        first, numel = self.counters.unopened, self.outer.slow.numel
        if first is None:
            return
        assert isinstance(self.outer, NoLoCo), "only its swaps overlap"
        left = [(max(start, first), stop) for start, stop in parts(numel) if stop > first]
        for _ in PartOpening(self.outer, left).open(range(len(left)), self.inner.step, wait=True):
            pass
        self.counters.unopened = None

    def begin_phase(self) -> None:
        """The next inner phase begins at the current step."""
        self.counters.boundary_step, self.counters.phase_steps_done = self.inner.step, 0

    def adopt(self, state: State) -> None:
        """Take the slow weights of a member; θ = φ, and the optimizer is reset.

        The position becomes the member's as well, also between two boundaries: both reach the next one together.
        """
        with self.outer.slow.changing:
            self._take_over(state)
            self.counters.unopened = None
            self.forget()
            self.drop_kept()  # it is of changes to other weights

    def rebase(self, state: State, counted: Tensor | None = None) -> None:
        """Take the slow weights and the position of a member, and keep this peer's change: θ ← φ_theirs + (θ − φ_own).

        ``counted``: the part of that change that φ_theirs contains; what rounding had kept back was sent with it. The
        optimizer keeps its moments.
        """
        slow = self.outer.slow
        change = host_vector(slow.numel)
        slow.read_fast(0, change)
        change.sub_(slow.phi)
        if counted is not None:
            change.sub_(counted)
            self.drop_kept()
        with slow.changing:
            self._take_over(state)
            for start, stop in parts(slow.numel):  # a full device has no room for a whole parameter's change
                slow.add_to_fast(change[start:stop], start)

    def drop_kept(self) -> None:
        """Others have what rounding has kept back, or it is of no use to them."""
        if self.kept is not None:
            self.kept.zero_()

    @contextmanager
    def trying(self, phi: Tensor) -> Iterator[None]:
        """Within the context θ is ``phi`` (flat fp32, host), up to rounding; then θ is restored."""
        slow = self.outer.slow
        theta = host_vector(slow.numel)
        slow.read_fast(0, theta)
        for start, stop in parts(slow.numel):
            slow.add_to_fast(phi[start:stop] - theta[start:stop], start)
        try:
            yield
        finally:
            slow.write_fast()
            for start, stop in parts(slow.numel):
                slow.add_to_fast(theta[start:stop] - slow.phi[start:stop], start)

    def take_outer(self, vectors: Mapping[str, Tensor]) -> None:
        """Restore :meth:`saved_vectors`; θ does not change."""
        self.replaced += 1
        with self.outer.slow.changing:
            for name, vector in self.saved_vectors().items():
                vector.copy_(vectors[name])

    def _fingerprint(self) -> str:
        """A digest of φ."""
        return xxhash.xxh3_128_hexdigest(as_bytes(self.outer.slow.phi))

    def _take_over(self, state: State) -> None:
        self.take_outer({**self.saved_vectors(), **dict(zip(self.named_vectors(), state.vectors, strict=True))})
        self.outer.slow.write_fast()
        self.inner.step = state.step + state.phase_steps_done
        self.counters.round, self.counters.boundary_step = state.round, state.step
        self.counters.phase_steps_done, self.counters.lineage = state.phase_steps_done, state.lineage
        self.counters.root = state.root
