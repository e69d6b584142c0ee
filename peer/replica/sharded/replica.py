"""Rank 0 builds the replica of a peer of several ranks; training/replica.py builds that of one rank."""

from __future__ import annotations

import torch

from peer.config.schema import Config
from peer.errors import UserError
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from peer.replica.sharded import channel, launch
from peer.replica.sharded.commands import ReplicaPlan
from peer.replica.sharded.inner_loop import LeadingLoop
from peer.replica.sharded.ranks import Ranks
from peer.replica.sharded.sharding import sharded
from peer.replica.sharded.weights import GatheredWeights


def build(
    ranks: Ranks, config: Config, device: torch.device, *, bf16: bool, context: LoopContext
) -> tuple[InnerLoop, SlowWeights]:
    """The inner loop and the weights. Only rank 0 makes the whole initial weights, on the host."""
    launch.require_fit(config, ranks.rank.size, torch.cuda.device_count() if device.type == "cuda" else None)
    network = model.build(config.run)
    if not all(parameter.requires_grad for parameter in network.parameters()):
        raise UserError("run.model: some of its parameters are frozen; start it without torchrun")
    numel = model.parameter_count(network)
    window = min(channel.WINDOW_ELEMENTS, numel)
    buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    plan = ReplicaPlan(config, device.type, bf16, numel, window, buffers)
    memory = channel.SharedMemory(ranks.memory, numel, window)
    with torch.no_grad():  # the order of SlowWeights
        torch.cat([parameter.reshape(-1) for parameter in network.parameters()], out=memory.phi)
    del network  # the shared memory has its weights now

    ranks.tell(lambda _: plan)
    with ranks.in_step():
        shards, own_device = sharded(plan, ranks.rank)
    inner = LeadingLoop(shards, plan, own_device, ranks, context)
    weights = GatheredWeights(shards.named_parameters(), inner.optimizer, memory, ranks.rank, ranks=ranks)
    weights.write_fast()
    return inner, weights
