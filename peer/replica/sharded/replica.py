"""The replica of a peer of several ranks, sharded by FSDP2; training/replica.py builds that of one rank."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from peer.config.schema import Config
from peer.device.accelerator import connect_ranks, device_count
from peer.errors import UserError
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext, cores
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from peer.replica.sharded import channel, launch
from peer.replica.sharded.commands import ReplicaPlan
from peer.replica.sharded.inner_loop import LeadingLoop
from peer.replica.sharded.launch import Rank
from peer.replica.sharded.ranks import Ranks
from peer.replica.sharded.weights import GatheredWeights

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of every collective; the first one may wait for a compiler


def build(
    ranks: Ranks, config: Config, device: torch.device, *, bf16: bool, context: LoopContext
) -> tuple[InnerLoop, SlowWeights]:
    """Rank 0: the inner loop and the weights. Only rank 0 makes the whole initial weights, on the host."""
    launch.require_fit(config, ranks.rank.size, device_count(device))
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


def sharded(plan: ReplicaPlan, rank: Rank) -> tuple[nn.Module, torch.device]:
    """The run's model with this rank's shard of every parameter, without values yet, and the rank's device.

    Waits for the other ranks. The model is never whole in memory. Raises :class:`UserError` if FSDP2 cannot shard it.
    """
    own = plan.config.peer
    _set_threads(own.threads, rank.size)
    device, mesh = _connect(plan, rank)
    network = model.outline(plan.config.run)
    if own.gradient_checkpointing:
        model.checkpoint_activations(network)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if plan.bf16 else MixedPrecisionPolicy()
    blocks = blocks_of(network)
    try:
        for module in (*blocks, network):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"run.model: FSDP2 cannot shard it: {error}; start it without torchrun") from None
    if own.compile:
        for block in blocks:
            block.compile()
    _materialize(network, device, plan.buffers)
    return network, device


def _set_threads(wish: int | None, ranks: int) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 where it is unset, and all GPUs would wait for one thread of rank 0 in the
    outer step. So the ranks share the cores. A user's own 1 looks the same: ``peer.threads`` is the way to ask for it.
    """
    if wish is None and os.environ.get("OMP_NUM_THREADS") == "1":
        wish = max(1, cores() // ranks)
    if wish is not None:
        torch.set_num_threads(wish)


def _connect(plan: ReplicaPlan, rank: Rank) -> tuple[torch.device, DeviceMesh]:
    """The rank's own device, which becomes the default of the process, and all ranks, by torchrun's environment."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would use the host name, which may be another address
    device = connect_ranks(plan.device, rank.number, COLLECTIVE_TIMEOUT)
    return device, init_device_mesh(device.type, (rank.size,))


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The modules that transformers says must not be split: the layers. Inner modules come first."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names][::-1]


def _materialize(network: nn.Module, device: torch.device, buffers: dict[str, torch.Tensor]) -> None:
    """Move ``network`` from the meta device to ``device``. ``to_empty`` alone would untie tied parameters."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append((module, name))
    network.to_empty(device=device)
    for (first, name), *others in users.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
