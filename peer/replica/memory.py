"""The memory that a peer needs, estimated from its configuration by ``noloco-peer check``, without weights.

The activations are counted: one training step runs on fake tensors (shapes without data) under a dispatch mode that
sums the live storages. So the estimate covers any model of transformers.
"""

from __future__ import annotations

import os
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peer.config.methods import DiLoCoConfig, LocalConfig
from peer.config.schema import PeerConfig, RunConfig
from peer.device.accelerator import attention_keeps_scores, pick_device, wants_bf16
from peer.device.copies import has_streams
from peer.device.memory import PROCESS_BYTES, allocator_slack, context_bytes, device_memory, shares_host_memory
from peer.outer.method import vector_names
from peer.outer.noloco import most_coming
from peer.process import CONTAINER
from peer.replica import model
from peer.replica.inner_loop import batch_loss
from peer.replica.offload import under_way_bytes
from peer.replica.optimizer import moment_count
from peer.replica.sharded.channel import WINDOW_ELEMENTS
from peer.replica.sharded.replica import blocks_of
from peer.rounds.contribution import PART, most_open, parts

TIGHT_SHARE = 0.87  # of what is free: an estimate is within 15%
GPU_MEMORY = "GPU memory"


@dataclass(frozen=True)
class Memory:
    """Peak bytes of training on each device and on the host; on a CPU, add them. The ``parts`` sum up to both together.
    ``giving_bytes``: further host bytes while a newcomer downloads copies of φ and δ; two newcomers may do so at once.
    ``taking_bytes``: while this peer takes those of a member, which it tries, or to which it adds its own change.
    """

    device_bytes: int
    host_bytes: int
    parts: dict[str, int]
    giving_bytes: int
    taking_bytes: int


def estimate(run: RunConfig, peer: PeerConfig, ranks: int = 1) -> Memory:
    """The memory of a peer. Raises the same :class:`peer.errors.UserError` as building the model."""
    device = pick_device(peer.device)
    pinned, bf16, offload = has_streams(device), wants_bf16(peer.precision, device), peer.offload == "optimizer"
    outline = model.outline(run)
    sizes = [it.numel() for it in outline.parameters() if it.requires_grad]
    numel = sum(sizes)
    weights, moments = 4 * numel, 4 * moment_count(outline, run.inner)
    shard, slack = -(-weights // ranks), allocator_slack(device)
    step = step_bytes(run, peer, device, ranks)
    vector, vectors = _host_bytes(numel, pinned), vector_names(run)
    swap = swap_bytes(numel) if run.exchange.overlap else weights * (1 + isinstance(run.outer, DiLoCoConfig))
    on_device = {
        "weights": shard,
        "gradients": 0 if offload else shard,
        "moments": 0 if offload else -(-moments // ranks),
        "gathered": round(slack * gathered_bytes(outline, bf16=bf16)) if ranks > 1 else 0,
        "activations": round(slack * (step if one_by_one(peer, ranks) else step - weights)),
        "context": context_bytes(device),
    }
    if offload and not one_by_one(peer, ranks):
        on_device["whole_gradients"] = shard
    if pinned and offload:
        on_device["gradient_copies"] = under_way_bytes([4 * it for it in sizes])
    # Parts to the host, and until the queued step ends those that come back. Several ranks wait for each copy instead.
    if pinned and run.exchange.overlap and ranks == 1:
        count = len(parts(numel))
        on_device["swap_copies"] = sum(4 * min(numel, PART * it) for it in (2 * most_coming(count), most_open(count)))
    on_host = {
        "slow_weights": weights if ranks > 1 else vector,
        "window": min(4 * WINDOW_ELEMENTS, weights) if ranks > 1 else 0,
        "momentum": weights if "momentum" in vectors else 0,
        "kept": weights if "kept" in vectors else 0,
        "swap_buffer": swap,
        # before they are written to the disk
        "checkpoint": moments if (device.type != "cpu" and not offload) or ranks > 1 else 0,
        "process": PROCESS_BYTES * ranks,
    }
    if offload:  # with micro-batches, the sums and as much under way
        sums = sum(_host_bytes(it, pinned) for it in sizes)
        accumulated = 1 + (peer.micro_batch not in (None, run.batch_size))
        on_host |= {"weight_copies": vector, "gradients": sums * accumulated, "moments": moments}
    giving = weights * (1 + bool(on_host["momentum"]))
    # beside them θ, or this peer's change; no overlapped swap runs then
    taking = giving + weights - (swap if run.exchange.overlap else 0)
    if isinstance(run.outer, LocalConfig):  # it takes none
        taking = 0
    return Memory(sum(on_device.values()), sum(on_host.values()), {**on_device, **on_host}, giving, taking)


def swap_bytes(numel: int) -> int:
    """Of an overlapped swap: the corrections in bf16, until the next losses have judged them; and of each open part
    this peer's contribution, its change and the partner's.
    """
    return 2 * numel + 3 * 4 * min(numel, PART * most_open(len(parts(numel))))


def _host_bytes(elements: int, pinned: bool) -> int:
    """Of an fp32 tensor on the host: torch rounds pinned memory up to a power of two."""
    return 1 << (4 * elements - 1).bit_length() if pinned else 4 * elements


def room(needed: Memory, device: torch.device, ranks: int = 1) -> dict[str, tuple[int, int]]:
    """Needed and free bytes, of each GPU and of the host; without the host's where its free bytes are unknown.

    Apple's GPU has the host's memory, of which macOS says only how much there is.
    """
    host = needed.host_bytes + (ranks * needed.device_bytes if shares_host_memory(device) else 0)
    found = {} if device.type == "cpu" else {GPU_MEMORY: (needed.device_bytes, device_memory(device).free)}
    free = available_memory()
    if free is None and found and shares_host_memory(device):
        free = machine_memory()
    return found if free is None else {**found, "memory": (host, free)}


def gathered_bytes(outline: nn.Module, *, bf16: bool) -> int:
    """Peak bytes that FSDP2 holds unsharded: the parameters outside the layers, those of the current and of the next
    layer, and the gradients of the larger of these, with the buffer that is summed over the ranks.
    """
    layers = [model.parameter_count(block) for block in blocks_of(outline)] or [0]
    root = model.parameter_count(outline) - sum(layers)
    each = 2 if bf16 else 4
    return each * (root + 2 * max(layers)) + (each + 4) * max(root, *layers)


def available_memory() -> int | None:
    """Free bytes without swapping, as Linux reports, within a container's limit; ``None`` on other systems."""
    kibibytes = _figure("/proc/meminfo", "MemAvailable:")
    if kibibytes is None:
        return None
    limit, used = _figure(f"{CONTAINER}/memory.max"), _figure(f"{CONTAINER}/memory.current")
    if limit is None or used is None:
        return 1024 * kibibytes
    # pages of files, which are in ``used`` and which the kernel can drop: the kubelet subtracts them too
    droppable = _figure(f"{CONTAINER}/memory.stat", "inactive_file ") or 0
    return min(1024 * kibibytes, max(0, limit - max(0, used - droppable)))


def machine_memory() -> int:
    """Bytes of the host, used or free, within a container's limit."""
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _figure(f"{CONTAINER}/memory.max")
    return total if limit is None else min(total, limit)


def _figure(path: str, begin: str = "") -> int | None:
    """The number in a file of Linux, after ``begin`` in its line; ``None`` without one, as for "max"."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
        return next(int(line.removeprefix(begin).split()[0]) for line in lines if line.startswith(begin))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def one_by_one(peer: PeerConfig, ranks: int) -> bool:
    """Is only one gradient at a time whole? A compiled model gives all of them when its backward pass has ended; with
    several ranks each layer is compiled by itself.
    """
    return ranks > 1 or (peer.offload == "optimizer" and not peer.compile)


def step_bytes(run: RunConfig, peer: PeerConfig, device: torch.device, ranks: int = 1) -> int:
    """Peak bytes of gradients and activations in a training step, as torch's allocator counts them.

    With several ``ranks``: of one rank, which gathers its weights in bf16 and so needs no autocast with a copy of them.
    """
    rows, bf16 = run.batch_size // ranks, wants_bf16(peer.precision, device)
    size = peer.micro_batch or rows
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = model.untrained(run, torch.bfloat16 if bf16 and ranks > 1 else torch.float32)
        network.train()
        if peer.gradient_checkpointing:
            model.checkpoint_activations(network)
        if one_by_one(peer, ranks):
            for parameter in network.parameters():
                parameter.register_post_accumulate_grad_hook(_drop)
        kernels = sdpa_kernel(SDPBackend.MATH) if attention_keeps_scores(device) else nullcontext()
        with _Ledger(network) as ledger, kernels:
            # from the second micro-batch on the gradients exist already, unless they have gone to the host
            for _ in range(1 if peer.offload == "optimizer" else min(2, rows // size)):
                batch = torch.zeros(size, run.data.sequence_length + 1, dtype=torch.int64)
                batch_loss(network, batch, torch.device("cpu"), autocast=bf16 and ranks == 1).backward()
    return ledger.peak


class _Ledger(TorchDispatchMode):
    """Counts the storages that operators allocate, until they are freed; without the model's own."""

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
