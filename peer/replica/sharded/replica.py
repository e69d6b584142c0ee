"""Rank 0 builds the replica with the other ranks: what training/replica.py builds in one process, in several."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peer.config.schema import Config
from peer.errors import UserError
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from peer.replica.sharded import launch, sharding, shared
from peer.replica.sharded.commands import ReplicaPlan
from peer.replica.sharded.inner_loop import LeadingLoop
from peer.replica.sharded.ranks import Ranks
from peer.replica.sharded.weights import GatheredWeights


def build(
    ranks: Ranks, config: Config, device: torch.device, *, bf16: bool, context: LoopContext
) -> tuple[InnerLoop, SlowWeights]:
    """The inner loop and the weights, as of a peer of one rank. The weights are made here alone, on the host."""
    size = ranks.rank.size
    launch.require_fit(config, size, torch.cuda.device_count() if device.type == "cuda" else None)
    network = model.build(config.run)
    if not all(parameter.requires_grad for parameter in network.parameters()):
        raise UserError("run.model: some of its parameters are not trained; start it without torchrun")
    numel = model.parameter_count(network)
    window = min(shared.WINDOW_ELEMENTS, numel)
    buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    plan = ReplicaPlan(config, device.type, bf16, numel, window, buffers)
    shared.reserve(ranks.memory, numel, window)
    memory = shared.SharedMemory(ranks.memory, numel, window)
    _lay_out(network, memory.phi)
    del network  # its weights lie in the shared memory from here on

    ranks.tell(lambda _: plan)
    with ranks.in_step():
        here = sharding.device_of(plan, ranks.rank)
        sharded = sharding.sharded(plan, sharding.open_group(here, size), here)
    inner = LeadingLoop(sharded, plan, here, ranks, context)
    weights = GatheredWeights(sharded.named_parameters(), inner.optimizer, memory, (0, size), ranks=ranks)
    weights.write_fast()
    return inner, weights


def _lay_out(network: nn.Module, phi: Tensor) -> None:
    """The trained parameters one after the other, as :class:`SlowWeights` has them."""
    with torch.no_grad():
        torch.cat([parameter.reshape(-1) for parameter in network.parameters()], out=phi)
