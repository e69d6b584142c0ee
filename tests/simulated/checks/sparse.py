"""What a group averages by the largest coefficients, for the ledger: NaN is what a member did not send."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from peer.rounds.contribution import SparseContribution


def elements(contribution: Any) -> Tensor:
    """All elements of a contribution of either kind."""
    if isinstance(contribution, SparseContribution):
        own = torch.full((contribution.numel,), torch.nan)
        own[contribution.positions] = contribution.values
        return own
    own = torch.empty(contribution.numel)
    contribution.read(0, own)
    return own


def senders_mean(group: Sequence[Tensor], clip: float) -> Tensor:
    """Each coefficient's mean over those that sent it. Of three and more, nobody's is longer than ``clip`` times the
    median one.
    """
    rows = torch.stack(list(group))
    norms = rows.nan_to_num().norm(dim=1)
    reach = clip * median(norms.tolist()) if len(group) > 2 else 0.0
    scale = (reach / norms).clamp(max=1) if reach else torch.ones_like(norms)
    return (rows * scale[:, None]).nanmean(0).nan_to_num()
