"""Muon for matrices that FSDP2 has divided by rows.

Orthogonalisation needs whole matrices. The ranks divide it by matrix: of each ``size`` matrices, rank r collects the
r-th, lets torch's Muon orthogonalise it, and returns the rows of the others. Momentum and weight decay are computed
where the rows are, so a rank keeps its shard of the momentum and holds one whole matrix at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from peer.replica.optimizer import MUON_MOMENTUM, MUON_SCALE


class ShardedMuon(Optimizer):
    """The same step as :func:`peer.replica.optimizer.torch_muon`, on all ranks together."""

    def __init__(self, matrices: Sequence[nn.Parameter], weight_decay: float) -> None:
        by_size = sorted(matrices, key=nn.Parameter.numel)  # so that the ranks have equal work
        super().__init__(by_size, {"lr": 0.0, "weight_decay": weight_decay})
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; collective. ``closure`` is not called."""
        (group,) = self.param_groups
        matrices = [it for it in group["params"] if it.grad is not None]
        for start in range(0, len(matrices), self._size):
            self._step(matrices[start : start + self._size], group["lr"], group["weight_decay"])

    def _step(self, matrices: Sequence[Any], rate: float, weight_decay: float) -> None:
        """At most a matrix a rank."""
        updates = [self._momentum(matrix).flatten() for matrix in matrices]
        rows = [it.numel() for it in updates] + [0] * (self._size - len(matrices))
        own = matrices[self._rank].shape if self._rank < len(matrices) else torch.Size((0, 0))
        of_own = [self._rows(own, number) * own[1] for number in range(self._size)]

        whole = _exchange(torch.cat(updates), rows, of_own)
        change = _orthogonal_step(whole.view(own), rate) if whole.numel() else whole.float()
        changes = _exchange(change.flatten(), of_own, rows).split(rows)
        for matrix, its in zip(matrices, changes, strict=False):
            shard = matrix.to_local()
            shard.mul_(1 - rate * weight_decay).add_(its.view_as(shard))

    def _momentum(self, matrix: Any) -> Tensor:
        """This rank's rows of what is orthogonalised, in bf16 as torch's Muon does."""
        state, gradient = self.state[matrix], matrix.grad.to_local()
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        return gradient.lerp(momentum, MUON_MOMENTUM).bfloat16()

    def _rows(self, shape: torch.Size, number: int) -> int:
        """The rows of rank ``number``, as torch.chunk divides them."""
        each = -(-shape[0] // self._size)
        return max(0, min(each, shape[0] - number * each))


def _orthogonal_step(update: Tensor, rate: float) -> Tensor:
    """What torch's Muon adds to a matrix for this ``update`` at this learning rate, fp32."""
    whole = nn.Parameter(torch.zeros(update.shape, device=update.device))
    whole.grad = update.float()
    torch.optim.Muon([whole], lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=MUON_SCALE).step()
    return whole.detach()


def _exchange(flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """``sent[r]`` elements of ``flat`` go to rank r; the elements from all ranks, in their order."""
    out = flat.new_empty(sum(received))
    distributed.all_to_all_single(out, flat.contiguous(), received, sent)
    return out
