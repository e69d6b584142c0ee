"""What a peer is made of: one state for a checkpoint, a resume and a newcomer.

Previous station: inner.py and outer/. Next stations: checkpoint.py (disk) and swarm/join.py (network).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peer.checkpoint import Saved, Tensors
from peer.data import Stream
from peer.inner import InnerLoop
from peer.outer.method import OuterMethod
from peer.rounds import NO_ROUNDS, Lineage
from peer.swarm.donor import State


@dataclass
class Counters:
    """Where a peer is. ``round`` and the inner loop's ``step`` are the swarm's; ``tokens`` is this peer's own."""

    round: int = 0
    tokens: int = 0
    phase_steps_done: int = 0  # inner steps since the last boundary
    phase_tokens: int = 0  # this peer's own since then: the weight of its contribution
    boundary_step: int = 0  # the inner loop's step at the last boundary
    lineage: Lineage = NO_ROUNDS  # the rounds of everyone that the slow weights have in them


class PeerState:
    """Reads and writes the state of the parts it is given."""

    def __init__(
        self,
        inner: InnerLoop,
        outer: OuterMethod,
        stream: Stream,
        config: str,
        origin: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.inner, self.outer, self.stream = inner, outer, stream
        self.counters = Counters()
        self._config, self._origin = config, dict(origin)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint: θ, φ, δ and AdamW's two moments, fp32."""
        return 5 * 4 * self.outer.slow.numel

    # -- checkpoint

    def tensors(self) -> Mapping[str, Tensors]:
        """Files of a checkpoint, each made when it is asked for. The tensors are the live ones where they can be."""
        outer = {"phi": self.outer.slow.phi}
        if self.outer.momentum is not None:
            outer["momentum"] = self.outer.momentum
        return Files(
            {
                "model": self.outer.slow.tensors,
                "outer": lambda: outer,
                "optimizer": lambda: self.outer.slow.moments(self.inner.optimizer),
            }
        )

    def scalars(self) -> dict[str, Any]:
        """The JSON half of a checkpoint."""
        return {
            "config": self._config,
            "origin": self._origin,  # the run and the model in words: what export makes a folder from
            "inner_step": self.inner.step,
            "position": self.stream.position,
            "cursor": self.stream.cursor,
            **vars(self.counters),
            "rng": _rng(),
        }

    def refusal(self, scalars: dict[str, Any]) -> str:
        """Why a checkpoint cannot be resumed; empty when it can."""
        if scalars["config"] != self._config:
            return (
                f"is of a run with the configuration digest {scalars['config']}, this one has {self._config}; "
                "choose another run.name or run.dir, or set peer.checkpoint.resume: false"
            )
        if isinstance(scalars.get("lineage"), str):
            return "was written by an older version; choose another run.dir, or set peer.checkpoint.resume: false"
        return ""

    def restore(self, saved: Saved) -> None:
        """Take over a checkpoint whole."""
        self.outer.slow.take(saved.tensors["model"])
        self.outer.slow.take_moments(self.inner.optimizer, saved.tensors["optimizer"])
        self._take_outer(saved.tensors["outer"])
        scalars = saved.state
        self.inner.step = scalars["inner_step"]
        self.stream.resume(scalars["position"], scalars.get("cursor"))
        for key in vars(self.counters):
            setattr(self.counters, key, scalars[key])
        self.counters.lineage = Lineage(*scalars["lineage"])
        _set_rng(scalars["rng"])

    # -- newcomers

    def snapshot(self) -> State:
        """Copies of φ and δ with the counters of the same boundary. Safe to call from any thread."""
        with self.outer.slow.changing():
            return State(
                self.counters.boundary_step,
                self.counters.round,
                [it.clone() for it in self.vectors()],
                lineage=self.counters.lineage,
                phase_steps_done=max(0, self.inner.step - self.counters.boundary_step),
            )

    def vectors(self) -> list[Tensor]:
        """The outer state that a newcomer needs: φ and, where the method has one, δ. Flat fp32 on the host."""
        momentum = self.outer.momentum
        return [self.outer.slow.phi] if momentum is None else [self.outer.slow.phi, momentum]

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
        """Become a newcomer with a member's slow weights: θ = φ, so Δ is zero; AdamW starts anew.

        It goes on from where the member stands between two boundaries, so that both reach the next one together.
        """
        with self.outer.slow.changing():
            self._take_outer(dict(zip(("phi", "momentum"), state.vectors, strict=False)))
            self.outer.slow.write_fast()
            self.outer.slow.take_moments(self.inner.optimizer, {})
            self._stand_by(state)

    def catch_up(self, state: State) -> None:
        """Take the slow weights of others without losing what was trained since: θ ← φ_theirs + (θ − φ_own).

        Round and step become theirs too, so that all come to the end of the run together. AdamW goes on.
        """
        slow = self.outer.slow
        change = torch.empty(slow.numel)
        slow.read_fast(0, change)
        change.sub_(slow.phi)
        with slow.changing():
            self._take_outer(dict(zip(("phi", "momentum"), state.vectors, strict=False)))
            slow.write_fast()
            slow.add_to_fast(change)
            self._stand_by(state)

    def _stand_by(self, state: State) -> None:
        self.inner.step = state.step + state.phase_steps_done
        self.counters.round, self.counters.boundary_step = state.round, state.step
        self.counters.phase_steps_done, self.counters.lineage = state.phase_steps_done, state.lineage

    def _take_outer(self, vectors: dict[str, Tensor]) -> None:
        with self.outer.slow.changing():
            self.outer.slow.phi.copy_(vectors["phi"])
            if self.outer.momentum is not None:
                self.outer.momentum.copy_(vectors["momentum"])


class Files(Mapping[str, Tensors]):
    """Of weights that lie on several GPUs a copy is made on the host: of one file at a time, then."""

    def __init__(self, makers: dict[str, Callable[[], Tensors]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensors:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _rng() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": [version, list(internal), gauss],
        "numpy": [numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]],
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
    }


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key, position = state["numpy"]
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, 0, 0.0))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
