"""The mean of sparse contributions, and how one becomes bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peer.rounds.contribution import SparseContribution

COEFFICIENT_BYTES = 4  # 16 bits of position in its chunk, an fp16 value


def mean_of_senders(group: Sequence[SparseContribution], out: Tensor) -> None:
    """``out`` ← each element's mean over those in ``group`` that have it, zero where nobody has."""
    count = torch.zeros_like(out, dtype=torch.int16)
    out.zero_()
    for sparse in group:
        out[sparse.positions] += sparse.values
        count[sparse.positions] += 1
    out.div_(count.clamp_(min=1))


def pack(sparse: SparseContribution) -> Tensor:
    """``COEFFICIENT_BYTES`` for each coefficient, seen as a vector of as many fp32."""
    out = np.empty((sparse.values.numel(), 2), dtype="<u2")
    out[:, 0] = (sparse.positions - sparse.bases).numpy()
    out[:, 1] = sparse.values.half().numpy().view("<u2")
    return torch.from_numpy(out.reshape(-1).view("<f4"))


def unpack(packed: Tensor, like: SparseContribution) -> SparseContribution:
    """Back from :func:`pack`; ``like`` is our own contribution, which has the same bases."""
    pairs = packed.numpy().view("<u2").reshape(-1, 2)
    positions = torch.from_numpy(pairs[:, 0].astype(np.int64)).add_(like.bases)
    values = torch.from_numpy(pairs[:, 1].copy().view("<f2").astype(np.float32))
    return SparseContribution(like.numel, like.bases, positions, values)
