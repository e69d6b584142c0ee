"""The inner loop of a peer of several ranks. Each rank trains on its share of every batch. Loss, gradient norm and step
are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from peer.process import LoopContext
from peer.replica.inner_loop import InnerLoop
from peer.replica.sharded.commands import Evaluate, ReplicaPlan, Step
from peer.replica.sharded.muon import ShardedMuon
from peer.replica.sharded.ranks import Ranks


class RankLoop(InnerLoop):
    """The inner loop of one rank. FSDP2 gathers in bf16, so there is no autocast."""

    def __init__(
        self, network: nn.Module, plan: ReplicaPlan, device: torch.device, size: int, context: LoopContext
    ) -> None:
        super().__init__(network, plan.config, device=device, context=context, muon=ShardedMuon)
        self._size = size

    def train_rows(self, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One step on this rank's share. The loss of the whole batch, and its gradient norm before clipping."""
        self.model.train()
        loss = self._backward(rows)  # FSDP2 averages the gradients over the ranks
        gradients = [it.grad.to_local() for it in self._parameters if it.grad is not None]  # type: ignore[attr-defined]
        square = nn.utils.get_total_norm(gradients).to(self.device) ** 2
        both = torch.stack([loss / self._size, square])
        distributed.all_reduce(both)
        norm = both[1].sqrt()
        torch._foreach_mul_(gradients, torch.clamp(self._settings.clip_norm / (norm + 1e-6), max=1.0))
        self._update(rate)
        return both[0], norm

    def evaluate_rows(self, batches: Iterable[Tensor]) -> float:
        """The mean loss over the shares of all ranks."""
        loss = torch.tensor(super().evaluate(batches) / self._size, device=self.device)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what stays gathered without a backward pass would become stale
        distributed.all_reduce(loss)
        return float(loss)


class LeadingLoop(RankLoop):
    """:class:`InnerLoop` in rank 0, which sends the other ranks their shares; their number divides a batch."""

    def __init__(
        self, network: nn.Module, plan: ReplicaPlan, device: torch.device, ranks: Ranks, context: LoopContext
    ) -> None:
        super().__init__(network, plan, device, ranks.rank.size, context)
        self._ranks = ranks

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        shares = [batch.chunk(self._size) for batch in batches]
        self._ranks.tell(lambda number: Evaluate([share[number].numpy() for share in shares]))
        with self._ranks.in_step():
            return self.evaluate_rows([share[0] for share in shares])

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        shares = batch.chunk(self._size)
        self._ranks.tell(lambda number: Step(shares[number].numpy(), rate))
        with self._ranks.in_step():
            return self.train_rows(shares[0], rate)
