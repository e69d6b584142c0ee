"""The inner loop: H steps on this peer's own data. It is arithmetic on the accelerator and nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.config.schema import Config, InnerConfig
from peer.device.copies import to_device
from peer.device.memory import is_of_driver, is_out_of_memory
from peer.errors import one_line
from peer.logs import get_logger
from peer.process import LoopContext
from peer.replica.offload import HostCopies, may_offload
from peer.replica.optimizer import MuonFactory, inner_optimizer, moment_count, torch_muon

log = get_logger("inner")


@dataclass(frozen=True)
class InnerReport:
    """The figures of an inner phase. ``loss``: mean over its steps in nats a token; NaN without a step."""

    steps: int
    tokens: int
    loss: float
    first_loss: float
    grad_norm: float  # of the last step, before clipping
    learning_rate: float  # of the last step
    seconds: float
    losses: int  # that are known: ``first_loss``, ``loss`` and ``spread`` are of them
    spread: float = math.nan  # standard deviation of the steps' losses; NaN with fewer than two
    broken_losses: int = 0  # of a program's own loop: told beside ``losses``, and not finite

    @property
    def broken(self) -> str:
        """What is not finite, in words; empty when all is. A loss is computed before its step changes the weights, so
        after the last step only the gradients show that they are broken.
        """
        if not self.steps or (math.isfinite(self.loss) and math.isfinite(self.grad_norm)):
            return ""
        if math.isfinite(self.loss):
            return f"the norm of the gradients is {self.grad_norm}"
        return f"the training loss is {self.loss}"


def learning_rate(step: int, total: int, settings: InnerConfig) -> float:
    """Linear warm-up, then cosine from the peak to ``min_lr_ratio`` of it at ``total`` steps."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = max(1, total - settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - settings.warmup_steps) / span)))
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


class InnerLoop:
    """Model and optimizer. ``step``: the swarm's step, which sets the learning rate."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        device: torch.device,
        context: LoopContext,
        autocast: bool = False,
        compiled: bool = False,
        muon: MuonFactory = torch_muon,
    ) -> None:
        self.model, self.device, self.step = model, device, 0
        self.loss: Tensor | float | None = None  # of the last step, on the device
        self._loss: Callable[..., Tensor] = torch.compile(token_loss) if compiled else token_loss
        self._settings, self._total, self._autocast = config.run.inner, config.run.steps, autocast
        self._micro_batch, self._context = config.peer.micro_batch, context
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies = HostCopies(self._parameters) if config.peer.offload == "optimizer" else None
        self.optimizer = inner_optimizer(model, self._settings, muon, self._copies)
        self.moment_count = moment_count(model, self._settings)

    def run(self, batches: Iterable[Tensor]) -> InnerReport:
        """Train on ``batches`` (``[B, T + 1]`` token ids each) until they end or this peer is away."""
        self.model.train()
        began = time.monotonic()
        losses: list[Tensor] = []  # they stay on the device until the phase ends
        tokens, norm, rate = 0, torch.tensor(0.0), 0.0
        for batch in batches:
            rate = learning_rate(self.step, self._total, self._settings)
            loss, norm = self._train_step(batch, rate)
            losses.append(loss)
            self.loss = loss
            tokens += batch.shape[0] * (batch.shape[1] - 1)
            self.step += 1
            self._context.progress.tick()
            if self._context.away:
                break
        values = torch.stack(losses).float().cpu() if losses else torch.full((1,), math.nan)
        return InnerReport(
            steps=len(losses),
            tokens=tokens,
            loss=float(values.mean()),
            first_loss=float(values[0]),
            grad_norm=float(norm),
            learning_rate=rate,
            seconds=time.monotonic() - began,
            losses=len(losses),
            spread=float(values.std()) if len(losses) > 1 else math.nan,
        )

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats a token over ``batches``, in micro-batches as in training."""
        pieces = (piece for batch in batches for piece in batch.split(self._micro_batch or batch.shape[0]))
        return mean_loss(self.model, pieces, self.device, self._autocast)

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        total = self._backward(batch)
        stepped = self._parameters if self._copies is None else self._copies.collect()
        norm = nn.utils.clip_grad_norm_(stepped, self._settings.clip_norm)
        self._update(rate)
        return total, norm

    def _backward(self, batch: Tensor) -> Tensor:
        """The gradients of the mean loss over ``batch``, and that loss; anew without torch.compile where that fails."""
        try:
            return self._gradients(batch)
        except (RuntimeError, OSError) as error:  # no compiler, no Triton for this GPU, an unknown operator
            if self._loss is token_loss or is_out_of_memory(error):
                raise
            self._loss = token_loss
            log.warning("peer.compile fails on this machine, training goes on without it: %s", one_line(error, 160))
        for it in self._parameters if self._copies is None else self._copies.collect():
            it.grad = None
        return self._gradients(batch)

    def _gradients(self, batch: Tensor) -> Tensor:
        size = self._micro_batch or batch.shape[0]
        share = size / batch.shape[0]
        total = torch.zeros((), device=self.device)
        for piece in batch.split(size):
            loss = self._loss(self.model, to_device(piece, self.device), self._autocast) * share
            loss.backward()
            total += loss.detach()
        return total

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Tensor], device: torch.device, autocast: bool = False) -> float:
    """Mean loss in nats a token over ``batches`` (``[B, T + 1]`` token ids each); also between two inner steps."""
    training = model.training
    model.eval()
    loss = float(torch.stack([batch_loss(model, batch, device, autocast) for batch in batches]).mean())
    model.train(training)
    return loss


def mean_loss_by_rows(
    model: nn.Module, batches: Iterable[Tensor], device: torch.device, *, autocast: bool = False
) -> float:
    """As :func:`mean_loss`, one row at a time, where no micro-batch is known: a batch's logits may be 250 GiB."""
    return mean_loss(model, (row for batch in batches for row in batch.split(1)), device, autocast)


def batch_loss(model: nn.Module, batch: Tensor, device: torch.device, autocast: bool) -> Tensor:
    """:func:`token_loss` of a batch that may be elsewhere."""
    return token_loss(model, to_device(batch, device), autocast)


def token_loss(model: nn.Module, batch: Tensor, autocast: bool) -> Tensor:
    """Cross entropy of the next token in ``batch`` (``[B, T + 1]`` token ids), fp32 scalar. Only this function shifts
    the targets.

    It is compiled as a whole: the logits are the largest tensor of all, and uncompiled the loss copies them repeatedly.
    On an H200 the preset of 125M then trains 2.2 times as many tokens/s as with the model compiled alone.
    """
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=autocast):
        output = model(input_ids=batch[:, :-1])
    logits, targets = output.logits, batch[:, 1:]
    if torch.is_grad_enabled():
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        balance = getattr(output, "aux_loss", None)  # of experts, where the model's config asks for it
        # only its gradient counts: the value stays the cross entropy, as in an evaluation
        return loss + _balance_share(model) * (balance - balance.detach()) if torch.is_tensor(balance) else loss
    # an evaluation is not compiled: all logits in fp32 would take more memory than a compiled training step
    rows = [functional.cross_entropy(row.float(), wanted) for row, wanted in zip(logits, targets, strict=True)]
    return torch.stack(rows).mean()


def _balance_share(model: Any) -> float:
    """The factor of the loss that balances experts. transformers adds that loss itself only where it has the labels."""
    names, owners = ("router_aux_loss_coef", "aux_loss_coef"), (model, model.config.get_text_config())
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return float(next((it for it in found if it is not None), 0.0))


def out_of_memory(error: BaseException, config: Config, ranks: int = 1) -> str:
    """The line for the user."""
    now = config.peer.micro_batch or "the whole batch"
    lower = f"lower peer.micro_batch (now {now})"
    said = str(error).partition("\n")[0].split(". ")[0]
    if is_of_driver(error):
        return f"{said}; end other programs on this GPU, free memory of the host, or {lower}"
    other = ", or set peer.offload: optimizer" if may_offload(config, ranks) else ""
    return f"{said}; {lower}{other}"
