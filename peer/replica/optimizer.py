"""The inner optimizer: AdamW, or Muon for the matrices of hidden layers and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from peer.config.schema import InnerConfig
from peer.errors import UserError
from peer.replica.offload import HostAdamW, HostCopies

MUON_MOMENTUM = 0.95  # with Nesterov's look-ahead, as kellerjordan.github.io/posts/muon
MUON_SCALE = "match_rms_adamw"  # a step is as long as AdamW's (arXiv 2502.16982), so the rates can be compared

MuonFactory = Callable[[Sequence[nn.Parameter], float], Optimizer]  # of these matrices, with this weight decay


def torch_muon(matrices: Sequence[nn.Parameter], weight_decay: float) -> Optimizer:
    """torch's own Muon."""
    return torch.optim.Muon(
        matrices, lr=0.0, weight_decay=weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn=MUON_SCALE
    )


def inner_optimizer(
    network: nn.Module, settings: InnerConfig, muon: MuonFactory = torch_muon, copies: HostCopies | None = None
) -> Optimizer:
    """The optimizer of the trained parameters; norms and biases do not decay. The learning rate is set before a step.
    It runs on the host with ``copies`` of the parameters.

    Raises :class:`UserError` as :func:`hidden_matrices`.
    """
    hidden = hidden_matrices(network) if settings.optimizer == "muon" else []
    known = {id(it) for it in hidden}
    rest = [it for it in network.parameters() if it.requires_grad and id(it) not in known]
    stepped = rest if copies is None else [copies.of[it] for it in rest]
    tables: dict[str, Any] = {"params": [it for it in stepped if it.dim() >= 2]}
    vectors: dict[str, Any] = {"params": [it for it in stepped if it.dim() < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW(
        [tables, vectors],
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,  # one kernel for all parameters, on every device that torch names
    )
    if copies is not None:
        return HostAdamW(copies, adamw)
    return MuonAndAdamW(muon(hidden, settings.weight_decay), adamw) if hidden else adamw


def hidden_matrices(network: nn.Module) -> list[nn.Parameter]:
    """The trained weights of linear layers without the head, which may be tied to the embeddings. Experts that a model
    keeps in one tensor of three dimensions are not among them.

    Raises :class:`UserError` if they cannot be told, if there are none, or if this torch has no Muon.
    """
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"run.inner.optimizer: muon needs torch 2.9 or newer, this is {torch.__version__}; update it, or use adamw"
        )
    head = network.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise UserError("run.inner.optimizer: muon, but run.model does not say which layer is its head; use adamw")
    excluded = {id(it) for it in head.parameters()}
    linear: list[Any] = [module.weight for module in network.modules() if isinstance(module, nn.Linear | Conv1D)]
    found = {id(it): it for it in linear if it.requires_grad and it.dim() == 2 and id(it) not in excluded}
    if not found:
        raise UserError("run.inner.optimizer: muon is for linear layers, and run.model has none that trains; use adamw")
    return list(found.values())


def moment_count(network: nn.Module, settings: InnerConfig) -> int:
    """The elements that the optimizer keeps: two for a parameter with AdamW, one with Muon."""
    trained = sum(it.numel() for it in network.parameters() if it.requires_grad)
    return 2 * trained - (sum(it.numel() for it in hidden_matrices(network)) if settings.optimizer == "muon" else 0)


class MuonAndAdamW(Optimizer):
    """Two optimizers of different parameters as one: one list of groups, one state by parameter."""

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        muon.state = adamw.state = self.state
        self._both = (muon, adamw)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of both. ``closure`` is not called."""
        for one in self._both:
            one.step()
