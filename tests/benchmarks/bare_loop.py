"""The loop that a peer's inner loop is measured against: PyTorch and nothing else, written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.config.schema import Config
from peer.replica.inner_loop import learning_rate


class BareLoop:
    """The same schedule, micro-batches, clipping and optimizer as the peer's. ``text``: token ids on the host."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        text: Tensor,
        *,
        autocast: bool = False,
        compiled: bool = False,
    ) -> None:
        self.network, self.optimizer, self.text, self.step = network, optimizer, text, 0
        self._run, self._size = config.run, config.peer.micro_batch or config.run.batch_size
        self._parameters = list(network.parameters())
        self._device, self._autocast = self._parameters[0].device, autocast
        self._loss: Callable[[Tensor], Tensor] = torch.compile(self._loss_of) if compiled else self._loss_of

    def batches(self, steps: int) -> Iterator[Tensor]:
        """Random windows of the text."""
        length = self._run.data.sequence_length + 1
        for _ in range(steps):
            starts = torch.randint(len(self.text) - length, (self._run.batch_size,)).tolist()
            yield torch.stack([self.text[start : start + length] for start in starts]).long()

    def run(self, batches: Iterable[Tensor]) -> list[float]:
        """A step a batch; the losses, which are read at the end only."""
        losses = []
        self.network.train()
        for batch in batches:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self._run.steps, self._run.inner)
            losses.append(self._backward(batch))
            nn.utils.clip_grad_norm_(self._parameters, self._run.inner.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
        return [float(it) for it in torch.stack(losses).cpu()] if losses else []

    def _backward(self, batch: Tensor) -> Tensor:
        pieces = batch.split(self._size)
        total = torch.zeros((), device=self._device)
        for piece in pieces:
            if self._device.type == "cuda":
                piece = piece.pin_memory().to(self._device, non_blocking=True)
            loss = self._loss(piece) / len(pieces)
            loss.backward()
            total += loss.detach()
        return total

    def _loss_of(self, piece: Tensor) -> Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            logits = self.network(input_ids=piece[:, :-1]).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
