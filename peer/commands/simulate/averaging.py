"""The average of a group of everyone in one process: the same contributions and means as between peers; their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.commands.simulate.replica import Replica
from peer.exchange.average import mean_of, mean_of_senders
from peer.exchange.codec import COEFFICIENT_BYTES
from peer.rounds.contribution import SparseContribution


def average(group: Sequence[Replica]) -> tuple[Tensor, int]:
    """The mean that every member of ``group`` gets, flat fp32, and the bytes that each of them sends for it.

    Each receives as much. Headers, some 300 bytes, and digests are left out.
    """
    contributions = [replica.state.outer.contribution() for replica in group]
    out, others = torch.empty(contributions[0].numel), len(group) - 1
    sparse = [it for it in contributions if isinstance(it, SparseContribution)]
    if sparse:
        mean_of_senders(sparse, out)
        return out, others * COEFFICIENT_BYTES * sparse[0].values.numel()
    mean_of([it for it in contributions if not isinstance(it, SparseContribution)], out)
    return out, round(2 * others / len(group) * out.nbytes)
