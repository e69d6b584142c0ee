"""The inner loop of a peer of several ranks: each trains on its share of every batch, and the losses, the gradients'
norm and the step are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from peer.process import LoopContext
from peer.replica.inner_loop import InnerLoop, mean_loss
from peer.replica.sharded.commands import Evaluate, ReplicaPlan, Step, rows_of
from peer.replica.sharded.ranks import Ranks
from peer.replica.sharded.sharding import reshard


class RankLoop(InnerLoop):
    """On every rank."""

    def __init__(
        self, network: nn.Module, plan: ReplicaPlan, device: torch.device, size: int, context: LoopContext
    ) -> None:
        run, own = plan.config.run, plan.config.peer
        super().__init__(
            network,
            run.inner,
            total_steps=run.steps,
            device=device,
            autocast=False,  # FSDP2 gathers weights in bf16 where that is wanted
            micro_batch=own.micro_batch,
            context=context,
        )
        self._size = size

    def train_rows(self, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One step on this rank's share: the whole batch's loss, and its gradient's norm before clipping."""
        self.model.train()
        loss = self._backward(rows)  # FSDP2 makes gradients means over the ranks
        gradients = [it.grad.to_local() for it in self._parameters if it.grad is not None]  # type: ignore[attr-defined]
        square = nn.utils.get_total_norm(gradients).to(self.device) ** 2
        both = torch.stack([loss / self._size, square])
        distributed.all_reduce(both)
        norm = both[1].sqrt()
        torch._foreach_mul_(gradients, torch.clamp(self._settings.clip_norm / (norm + 1e-6), max=1.0))
        self._update(rate)
        return both[0], norm

    def evaluate_rows(self, batches: Iterable[Tensor]) -> float:
        """The mean loss of all ranks' shares."""
        pieces = (piece for batch in batches for piece in batch.split(self._micro_batch or batch.shape[0]))
        loss = torch.tensor(mean_loss(self.model, pieces, self.device) / self._size, device=self.device)
        reshard(self.model)
        distributed.all_reduce(loss)
        return float(loss)


class LeadingLoop(RankLoop):
    """In rank 0: as :class:`InnerLoop` for everybody who uses it; the other ranks get their shares."""

    def __init__(
        self, network: nn.Module, plan: ReplicaPlan, device: torch.device, ranks: Ranks, context: LoopContext
    ) -> None:
        super().__init__(network, plan, device, ranks.rank.size, context)
        self._ranks = ranks

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        every = list(batches)
        self._ranks.tell(lambda number: Evaluate([rows_of(batch, number, self._size) for batch in every]))
        with self._ranks.in_step():
            return self.evaluate_rows([self._own(batch) for batch in every])

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        self._ranks.tell(lambda number: Step(rows_of(batch, number, self._size), rate))
        with self._ranks.in_step():
            return self.train_rows(self._own(batch), rate)

    def _own(self, batch: Tensor) -> Tensor:
        return batch[: batch.shape[0] // self._size]
