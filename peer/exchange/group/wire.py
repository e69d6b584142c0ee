"""What the members of a group say around their payloads, and how a sparse contribution becomes bytes.

Previous stations: wire.py, swarm/convention.py (which called the group). Next stations: mesh.py, group.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from peer.exchange.pair.wire import Header
from peer.p2p.stream import Message
from peer.rounds.contribution import Sparse
from peer.rounds.types import Outcome

Index = Annotated[int, Field(ge=0, lt=256)]
Detail = Annotated[str, Field(max_length=200)]


class Hello(Message):
    """First word on a stream between two members: which attempt, who, and what will follow."""

    kind: Literal["hello"] = "hello"
    token: Annotated[str, Field(max_length=64)]
    index: Index
    header: Header


class Report(Message):
    """A member to the convener: the digest of its result, or by whom it failed."""

    kind: Literal["report"] = "report"
    digest: Annotated[str, Field(max_length=64)] = ""
    culprit: Index | None = None
    outcome: Outcome = Outcome.MERGED
    detail: Detail = ""


class Verdict(Message):
    """The convener to all: everybody has the same result, use it; or nobody does."""

    kind: Literal["verdict"] = "verdict"
    commit: bool
    culprit: Index | None = None
    outcome: Outcome = Outcome.MERGED
    detail: Detail = ""


HELLO: TypeAdapter[Hello] = TypeAdapter(Hello)
REPORT: TypeAdapter[Report] = TypeAdapter(Report)
VERDICT: TypeAdapter[Verdict] = TypeAdapter(Verdict)


class Failed(Exception):
    """A group's round failed by the member at place ``culprit``."""

    def __init__(self, culprit: int, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.culprit, self.outcome, self.detail = culprit, outcome, detail


def pack(sparse: Sparse) -> Tensor:
    """4 bytes a coefficient (16 bits of place in its chunk, fp16 value), seen as a vector of as many fp32."""
    out = np.empty((sparse.values.numel(), 2), dtype="<u2")
    out[:, 0] = (sparse.positions - sparse.bases).numpy()
    out[:, 1] = sparse.values.half().numpy().view("<u2")
    return torch.from_numpy(out.reshape(-1).view("<f4"))


def unpack(packed: Tensor, like: Sparse) -> Sparse:
    """Back from :func:`pack`; ``like`` is our own contribution, which has the same bases."""
    pairs = packed.numpy().view("<u2").reshape(-1, 2)
    positions = torch.from_numpy(pairs[:, 0].astype(np.int64)).add_(like.bases)
    values = torch.from_numpy(pairs[:, 1].copy().view("<f2").astype(np.float32))
    return Sparse(like.numel, like.bases, positions, values)
