"""The average of a group of everyone in one process: the same contributions and means as between peers; their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.commands.simulate.replica import Replica
from peer.exchange.average import mean_of, mean_of_senders
from peer.exchange.pair.wire import SPARSE_BYTES
from peer.rounds.contribution import Contribution, Sparse


def average(group: Sequence[Replica]) -> tuple[Tensor, int]:
    """The mean that every member of ``group`` gets, flat fp32, and the bytes that each of them sends for it."""
    contributions = [replica.state.outer.contribution() for replica in group]
    out = torch.empty(contributions[0].numel)
    sparse = [it for it in contributions if isinstance(it, Sparse)]
    if sparse:
        mean_of_senders(sparse, out)
    else:
        dense: list[Contribution] = [it for it in contributions if not isinstance(it, Sparse)]
        mean_of(dense, out)
    return out, _bytes_sent(contributions[0], len(group))


def _bytes_sent(contribution: Contribution | Sparse, members: int) -> int:
    """By one member, who receives as much. Headers, some 300 bytes, left out.

    An all-reduce moves 2 (n − 1) / n of the tensor; what is sparse goes to everyone.
    """
    if members < 2:
        return 0
    if isinstance(contribution, Sparse):
        return (members - 1) * SPARSE_BYTES * contribution.values.numel()
    return round(2 * (members - 1) / members * 4 * contribution.numel)
