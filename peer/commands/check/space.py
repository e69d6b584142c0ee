"""Is there the memory and the disk that the run needs?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from peer.commands.check.finding import Finding, fail, ok, warn
from peer.config.schema import Config

CHECKPOINT_VECTORS = 5  # θ, φ, δ and AdamW's two moments, as in state.py
TIGHT_SHARE = 0.87  # an estimate is within 15%
GIB = 2**30


def memory(config: Config, ranks: int = 1) -> Iterator[Finding]:
    """The estimate of peer/replica/memory.py against what is free now."""
    import torch

    from peer.replica.device import pick_device
    from peer.replica.memory import estimate
    from peer.replica.sharded import launch
    from peer.swarm.state_transfer.donor import CLIENTS

    where = pick_device(config.peer.device)
    if ranks > 1:
        launch.require_fit(config, ranks, torch.cuda.device_count() if where.type == "cuda" else None)
    needed = estimate(config.run, config.peer, ranks)
    advice = "lower peer.micro_batch, set peer.gradient_checkpointing, or take a smaller model"
    what = f"{_parameters(config):,} parameters, AdamW, activations"
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        text = f"{what}; on each of {ranks} GPUs" if ranks > 1 else what
        yield _compared("GPU memory", needed.device_bytes, free, text, advice)
        what, host, advice = "slow weights, swap", needed.host_bytes, "end other programs"
    else:
        what, host = f"{what}, slow weights, swap", ranks * needed.device_bytes + needed.host_bytes
    available = available_memory()
    if available is not None:
        yield _compared("memory", host, available, what, advice, CLIENTS * needed.giving_bytes)


def disk(config: Config) -> Iterator[Finding]:
    """For the checkpoints that are kept and one in the making, as checkpoint.py wants it."""
    folder = config.run.dir.absolute()
    there = next(it for it in (folder, *folder.parents) if it.exists())
    needed = CHECKPOINT_VECTORS * 4 * _parameters(config) * (config.peer.checkpoint.keep + 1)
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        yield fail("disk", f"cannot write to {there}", "set run.dir to a folder of yours")
        return
    free = shutil.disk_usage(there).free
    text = f"checkpoints need {_gib(needed)}, {_gib(free)} free in {there}"
    if free < needed:
        yield fail("disk", text, "free some, set run.dir to another disk, or lower peer.checkpoint.keep")
    else:
        yield ok("disk", text)


def available_memory() -> int | None:
    """Bytes that can be had without swapping, as Linux says; ``None`` elsewhere. A container's limit counts."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    return min([free, *_of_container()])


def _of_container() -> list[int]:
    """What the cgroup of this process leaves, where it has a limit."""
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return []
    return [max(0, limit - used)]


def _compared(topic: str, needed: int, free: int, what: str, advice: str, at_times: int = 0) -> Finding:
    """``at_times``: what is needed on top of it, for a while only."""
    more = f", up to {_gib(at_times)} more while newcomers take its weights" if at_times else ""
    text = f"about {_gib(needed)} needed ({what}){more}, {_gib(free)} free"
    if TIGHT_SHARE * needed > free:
        return fail(topic, text, advice)
    return warn(topic, f"{text}: tight", advice) if needed + at_times > TIGHT_SHARE * free else ok(topic, text)


def _parameters(config: Config) -> int:
    from peer.replica.model import parameters_of

    return parameters_of(config.run)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
