"""Rank 0 builds the replica with its crew: what build.py makes of one process, made of several."""

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
from peer.replica.sharded.commands import Plan
from peer.replica.sharded.inner_loop import LeadingLoop
from peer.replica.sharded.ranks import Crew
from peer.replica.sharded.weights import Gathered


def build(
    crew: Crew, config: Config, device: torch.device, *, bf16: bool, context: LoopContext
) -> tuple[InnerLoop, SlowWeights]:
    """The inner loop and the weights, as of a peer of one rank. The weights are made here alone, on the host."""
    size = crew.rank.size
    launch.require_fit(config, size, torch.cuda.device_count() if device.type == "cuda" else None)
    run = config.run
    vocabulary = run.data.tokenizer.vocabulary
    network = model.build(run.model, sequence_length=run.data.sequence_length, seed=run.seed, vocabulary=vocabulary)
    if not all(parameter.requires_grad for parameter in network.parameters()):
        raise UserError("run.model: some of its parameters are not trained; start it without torchrun")
    numel = model.parameter_count(network)
    window = min(shared.WINDOW, numel)
    buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    plan = Plan(config, device.type, bf16, numel, window, buffers)
    shared.reserve(crew.memory, numel, window)
    memory = shared.Shared(crew.memory, numel, window)
    _lay_out(network, memory.phi)
    del network  # its weights lie in the shared memory from here on

    crew.tell(lambda _: plan)
    with crew.together():
        here = sharding.device_of(plan, crew.rank)
        sharded = sharding.sharded(plan, sharding.open_group(here, size), here)
    inner = LeadingLoop(sharded, plan, here, crew, context)
    weights = Gathered(sharded.named_parameters(), inner.optimizer, memory, (0, size), crew=crew)
    weights.write_fast()
    return inner, weights


def _lay_out(network: nn.Module, phi: Tensor) -> None:
    """The trained parameters one behind the other, as :class:`SlowWeights` has them."""
    with torch.no_grad():
        torch.cat([parameter.reshape(-1) for parameter in network.parameters()], out=phi)
