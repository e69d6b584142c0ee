"""The trained weights of a program's own model: their names, and whether they can be swapped.

Members must use the same name for a weight, so the wrappers torch.compile, DistributedDataParallel and activation
checkpointing are removed from it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.outer.slow_weights import Span, broken_weight

log = get_logger("outer_loop")

WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # in the names of parameters

COMPARED = 4096  # elements of each weight
SWAPPED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Named = list[tuple[str, nn.Parameter]]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within the wrappers of torch.compile and data parallelism."""
    while True:
        compiled = dict(model.named_children()).get("_orig_mod")  # an attribute may be that of a module further within
        if compiled is not None:
            model = compiled
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def trained(model: nn.Module) -> Named:
    """The trained parameters, each once, in the model's order. Raises :class:`UserError`."""
    if not isinstance(model, nn.Module):
        raise UserError(f"OuterLoop: the model is a {type(model).__name__}, not a torch.nn.Module")
    if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
        raise UserError(
            f"OuterLoop: this process is one of {ranks} ranks, and each would be a peer that the others change: start "
            "the program as one process, without torchrun"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UserError("OuterLoop: the model is spread over several ranks (FSDP); a peer is one process")
    named = [it for it in _named(unwrapped(model)) if it[1].requires_grad]
    if not named:
        raise UserError("OuterLoop: the model has no parameter that is trained (requires_grad)")
    for name, parameter in named:
        if objection := _objection(parameter, named[0][1].device):
            raise UserError(f"OuterLoop: {name} {objection}")
    places = sorted((it.data_ptr(), it.data_ptr() + it.nbytes, name) for name, it in named if it.numel())
    for (_, end, one), (start, _, other) in pairwise(places):
        if start < end:
            raise UserError(f"OuterLoop: {other} shares memory with {one}; tie them as one nn.Parameter")
    return named


def require_same(model: nn.Module, spans: Sequence[Span]) -> None:
    """Raises :class:`RunError` if the program trains other parameters than the swapped ones."""
    now = dict(_named(unwrapped(model)))
    for span in spans:
        if now.pop(span.name, None) is not span.parameter:
            raise RunError(
                f"the parameter {span.name} is not the one of OuterLoop.start any more: change weights in place, "
                "or start again with the new model"
            )
    for name, parameter in now.items():
        if parameter.requires_grad:
            raise RunError(f"{name} is trained and was not at OuterLoop.start: start again with all that is trained")


def require_finite(spans: Sequence[Span], step: int) -> None:
    """Raises :class:`RunError` for weights that are not finite. Waits for the accelerator once."""
    good = torch.stack([torch.isfinite(span.parameter.detach()).all() for span in spans]).tolist()
    if not all(good):
        raise broken_weight(spans[good.index(False)].name, step)


def optimizers_of(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a program gives: none, one, or several. Raises :class:`UserError` for something else."""
    if given is None:
        return ()
    optimizers = tuple(given) if isinstance(given, Iterable) else (given,)
    for it in optimizers:
        if not isinstance(it, torch.optim.Optimizer):
            raise UserError(f"OuterLoop: optimizer has a {type(it).__name__}; give a torch.optim.Optimizer, or several")
    return optimizers


def require_trains(optimizers: Iterable[torch.optim.Optimizer], named: Named) -> None:
    """Raises :class:`UserError` for an optimizer with none of these parameters, and for a schedule-free one. Warns of
    one that trains others too: a program may want a head of its own.
    """
    ours = {id(parameter) for _, parameter in named}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in ours for parameter in held):
            raise UserError(f"OuterLoop: the {type(optimizer).__name__} has none of the model's parameters")
        inside = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if "ScheduleFree" in type(inside).__name__:
            raise UserError(f"OuterLoop: {_undoes(inside)}")
        if others := sum(parameter.requires_grad and id(parameter) not in ours for parameter in held):
            log.warning(
                "the %s trains %d parameters outside the model: nobody averages them, each peer has its own; unless "
                "that is meant, give OuterLoop.start one nn.Module that holds all",
                type(inside).__name__,
                others,
            )


def require_no_masters(optimizers: Iterable[torch.optim.Optimizer], spans: Sequence[Span]) -> None:
    """Raises :class:`RunError` for an optimizer with fp32 masters of 16-bit weights, from which its next step would
    compute them, so that each merge is undone. After a step a rounded master equals its weight; a moment does not.
    Waits for the accelerator.
    """
    ours = {id(span.parameter) for span in spans}
    for optimizer in optimizers:
        pairs = defaultdict[str, list[tuple[Tensor, Tensor]]](list)
        for parameter, state in optimizer.state.items():
            if id(parameter) not in ours or parameter.element_size() > 2:  # averages of fp32 may be equal at first
                continue
            for key, value in state.items():
                plain = type(value) in (Tensor, nn.Parameter) and value.dtype is torch.float32
                if plain and value.shape == parameter.shape:
                    weights = parameter.detach().flatten()[:COMPARED]
                    pairs[key].append((value.flatten()[:COMPARED].to(weights), weights))
        for key, found in pairs.items():
            copies, all_weights = (torch.cat(it) for it in zip(*found, strict=True))
            if all_weights.any() and torch.equal(copies, all_weights):
                raise RunError(_undoes(optimizer, f" ({key})"))


def _undoes(optimizer: torch.optim.Optimizer, key: str = "") -> str:
    name = type(optimizer).__name__
    return f"the {name} computes the weights from its own copy{key}, which undoes every merge: use one without"


def _named(model: nn.Module) -> Named:
    """Tied weights once, under their first name."""
    return [(WRAPPERS.sub("", name), parameter) for name, parameter in model.named_parameters()]


def _objection(parameter: nn.Parameter, device: torch.device) -> str:
    """Why it cannot be swapped; empty when it can."""
    if nn.parameter.is_lazy(parameter):
        return "has no shape yet; give the model one batch first"
    if hasattr(parameter, "device_mesh"):
        return "is spread over several ranks (FSDP, tensor parallelism); OuterLoop wants whole ones, in one process"
    if parameter.device.type == "meta":
        return "is on the meta device; give the model its weights first"
    if parameter.device != device:
        return f"is on {parameter.device} and others are on {device}; OuterLoop wants all on one device"
    if parameter.dtype not in SWAPPED:
        return f"is of {parameter.dtype}; OuterLoop swaps real numbers of 16 bits or more"
    return "" if parameter.is_contiguous() else "is not contiguous in memory (channels_last?); make it so, or freeze it"
