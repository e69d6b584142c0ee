"""How much memory a peer needs, before it starts: from its configuration alone, without weights.

The activations are counted and not guessed: one training step runs on fake tensors (shapes without data) while a
dispatch mode books what is alive. So any model of transformers is estimated, and the answer knows of micro-batches,
autocast and gradient checkpointing. Called by ``noloco-peer check``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peer.config.schema import LocalConfig, PeerConfig, RunConfig
from peer.replica import model
from peer.replica.device import pick_device, wants_bf16
from peer.replica.inner_loop import batch_loss
from peer.replica.sharded.channel import WINDOW_ELEMENTS
from peer.replica.sharded.sharding import blocks_of

# Resident with all libraries loaded; measured on a CPU with both builds of torch 2.13.
PROCESS = (890 if torch.backends.cuda.is_built() else 436) * 2**20
CUDA_CONTEXT = 500 * 2**20  # of a GPU, for CUDA and its libraries
# What an allocator holds for activations, against what is alive: pieces of unlike sizes do not fit into one another.
# For the C library's it was measured on three sizes of model, for CUDA's it is what is usual.
ALLOCATOR_SLACK = {"cpu": 1.6, "cuda": 1.1}


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak, on each device and on the host; on a CPU both are of the same memory, so add them.
    ``parts`` sum up to both together. ``giving_bytes``: on the host, on top of all that, for as long as a newcomer
    takes φ and δ from this peer, which sends copies; two newcomers may do so at once.
    """

    device_bytes: int
    host_bytes: int
    parts: dict[str, int]
    giving_bytes: int


def estimate(run: RunConfig, peer: PeerConfig, ranks: int = 1) -> Memory:
    """What a peer needs on each of its devices and on the host. Raises :class:`peer.errors.UserError` as building it
    would.
    """
    device = pick_device(peer.device)
    pinned, bf16 = device.type == "cuda", wants_bf16(peer.precision, device)
    outline = model.outline(run)
    weights = 4 * model.parameter_count(outline)
    shard, slack = -(-weights // ranks), ALLOCATOR_SLACK[device.type]
    step = step_bytes(run, peer, autocast=bf16, ranks=ranks)
    vector = _power_of_two(weights) if pinned else weights  # so does torch round pinned memory
    on_device = {
        "weights": shard,
        "gradients": shard,
        "adamw_moments": 2 * shard,
        "gathered": round(slack * gathered_bytes(outline, bf16=bf16)) if ranks > 1 else 0,
        "activations": round(slack * (step if ranks > 1 else step - weights)),
        "cuda": CUDA_CONTEXT if pinned else 0,
    }
    on_host = {
        "slow_weights": weights if ranks > 1 else vector,
        "window": min(4 * WINDOW_ELEMENTS, weights) if ranks > 1 else 0,
        "momentum": 0 if isinstance(run.outer, LocalConfig) else vector,
        "swap_buffer": 0 if run.exchange.overlap else weights,
        "checkpoint": 2 * weights if pinned or ranks > 1 else 0,  # AdamW's moments on their way to the disk
        "process": PROCESS * ranks,
    }
    giving = weights * (1 + bool(on_host["momentum"]))
    return Memory(sum(on_device.values()), sum(on_host.values()), {**on_device, **on_host}, giving)


def gathered_bytes(outline: nn.Module, *, bf16: bool) -> int:
    """What FSDP2 has in one piece at the peak: what is outside the layers, the layer that computes and the next one,
    and the gradients of the larger of these, with the buffer from which they are added up over the ranks.
    """
    layers = [model.parameter_count(block) for block in blocks_of(outline)] or [0]
    root = model.parameter_count(outline) - sum(layers)
    each = 2 if bf16 else 4
    return each * (root + 2 * max(layers)) + (each + 4) * max(root, *layers)


def step_bytes(run: RunConfig, peer: PeerConfig, *, autocast: bool, ranks: int = 1) -> int:
    """Bytes of gradients and activations at the peak of a training step: what torch's allocator has handed out.

    Of one of several ``ranks``: without the gradients, of which it has but one at a time in one piece.
    """
    rows = run.batch_size // ranks
    size = peer.micro_batch or rows
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = model.untrained(run)
        network.train()
        if peer.gradient_checkpointing:
            model.checkpoint_activations(network)
        if ranks > 1:
            for parameter in network.parameters():
                parameter.register_post_accumulate_grad_hook(_drop)
        with _Ledger(network) as ledger:
            for _ in range(min(2, rows // size)):  # from the second one on, the gradients are there before
                batch = torch.zeros(size, run.data.sequence_length + 1, dtype=torch.int64)
                batch_loss(network, batch, torch.device("cpu"), autocast).backward()
    return ledger.peak


class _Ledger(TorchDispatchMode):
    """Books the storages that operators make, until they are freed; a model's own are not counted."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {it.untyped_storage()._cdata for it in (*network.parameters(), *network.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._book(leaf.untyped_storage())
        return out

    def _book(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
