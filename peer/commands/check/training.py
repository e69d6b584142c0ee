"""Does this machine have what the training needs: a device, memory, disk, the tokenizer of the model?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from peer.commands.check.finding import Finding, fail, ok, warn
from peer.config.schema import Config
from peer.device.accelerator import choosing_another, cpu_threads, device_count, pick_device, wants_bf16
from peer.device.copies import has_streams
from peer.device.memory import device_memory, shares_host_memory
from peer.errors import RunError, UserError
from peer.hub.push import rights
from peer.outer.method import vector_names
from peer.replica.memory import GPU_MEMORY, TIGHT_SHARE, estimate, room
from peer.replica.model import outline, parameters_of
from peer.replica.offload import may_offload
from peer.replica.optimizer import moment_count
from peer.replica.pretrained_tokenizer import compare
from peer.replica.sharded import launch
from peer.swarm.state_transfer.donor import CLIENTS
from peer.training.checkpoint import PUSH_COPIES, disk_room
from peer.training.run_folder import next_name
from peer.training.state import saved_bytes

GIB = 2**30


def device(config: Config, ranks: int) -> Iterator[Finding]:
    """The device of the model. Raises :class:`peer.errors.UserError` when the configured one is missing."""
    own = config.peer
    found = pick_device(own.device)
    if own.offload != "none" and shares_host_memory(found):
        text = f"the memory of {found.type} is the host's, so this only takes time"
        yield warn("offload", text, "set peer.offload: none")
    count = device_count(found)
    if count is not None:
        here = device_memory(found)
        bf16 = "bf16" if wants_bf16(own.precision, found) else "fp32"
        text = f"{here.name}, {here.total / GIB:.1f} GiB, computes in {bf16}"
        more = count - ranks
        if more > 0:
            advice = f"one process uses one GPU: torchrun makes them one peer, {choosing_another(found)} another peer"
            yield warn("device", f"{text}; {more} more not used", advice)
        else:
            yield ok("device", text)
        if has_streams(found) and not own.compile:
            advice = "peer.compile: true may train twice as fast, and takes half a minute at the start"
            if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
                advice += "; it needs a C compiler, and none is installed here"
            yield warn("compile", "torch.compile is off", advice)
        return
    text = f"CPU with {cpu_threads(own.threads)} threads"
    if own.device == "auto":
        advice = "if this machine has a GPU, look at its driver (nvidia-smi, rocm-smi) and the torch build"
        yield warn("device", f"torch finds no GPU; {text}", advice)
    else:
        yield ok("device", text)


def memory(config: Config, ranks: int) -> Iterator[Finding]:
    """The estimate of peer/replica/memory.py against the free memory."""
    where = pick_device(config.peer.device)
    if ranks > 1:
        launch.require_fit(config, ranks, device_count(where))
    needed = estimate(config.run, config.peer, ranks)
    advice = "lower peer.micro_batch, set peer.gradient_checkpointing, or take a smaller model"
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[config.run.inner.optimizer]
    on_device, on_host = [f"{parameters_of(config.run):,} parameters", optimizer, "activations"], ["slow weights, swap"]
    if where.type != "cpu" and config.peer.offload == "optimizer":
        on_device.remove(optimizer)
        on_host.insert(0, optimizer)
    at_times = CLIENTS * needed.giving_bytes + max(0, needed.taking_bytes)
    for topic, (count, free) in room(needed, where, ranks).items():
        if topic == GPU_MEMORY:
            what = ", ".join(on_device) + (f"; on each of {ranks} GPUs" if ranks > 1 else "")
            remedy = f"set peer.offload: optimizer, {advice}" if may_offload(config, ranks) else advice
            yield _compared(topic, count, free, what, remedy)
        elif where.type != "cpu":
            yield _compared(topic, count, free, ", ".join(on_host), "end other programs", at_times)
        else:
            yield _compared(topic, count, free, ", ".join(on_device + on_host), advice, at_times)


def disk(config: Config) -> Iterator[Finding]:
    """Space for the checkpoints that are kept, for one more and for a push, as training/checkpoint.py requires."""
    folder = config.run.dir.absolute()
    there = next(it for it in (folder, *folder.parents) if it.exists())
    network = outline(config.run)
    each = saved_bytes(network, len(vector_names(config.run)), moment_count(network, config.run.inner))
    keep, pushed = config.peer.checkpoint.keep, 0 if config.peer.push is None else PUSH_COPIES * saved_bytes(network)
    needed = each * (keep + 1) + pushed
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        yield fail("disk", f"cannot write to {there}", "set run.dir to a folder of yours")
        return
    try:
        found = disk_room(folder / (config.peer.name or next_name(folder)) / "checkpoints", each * keep)
    except OSError as error:  # a folder of another user
        yield fail("disk", f"{error.filename}: {error.strerror}", "set run.dir to a folder of yours")
        return
    what = "checkpoints and a push" if pushed else "checkpoints"
    text = f"{what} need {_gib(needed)}, {_gib(found)} free or in old checkpoints in {there}"
    if found < needed:
        yield fail("disk", text, "free some, set run.dir to another disk, or lower peer.checkpoint.keep")
    else:
        yield ok("disk", text)


def tokenizer(config: Config) -> Iterator[Finding]:
    """Does a pre-trained model get the token ids that it was trained with? No finding for fresh weights."""
    found = compare(config.run)
    if found is not None:
        yield warn("tokenizer", found.text, found.advice) if found.advice else ok("tokenizer", found.text)


def push(config: Config) -> Iterator[Finding]:
    """May this machine push to the repository of ``peer.push``? A peer that may not trains all the same."""
    wish = config.peer.push
    if wish is None:
        return
    try:
        yield ok("push", rights(wish.to, wish.private))
    except (UserError, RunError) as error:
        yield warn("push", str(error), "without that, training goes on and no weights are pushed")


def _compared(topic: str, needed: int, free: int, what: str, advice: str, at_times: int = 0) -> Finding:
    """``at_times``: bytes needed in addition while newcomers, and this peer itself, download."""
    more = f", up to {_gib(at_times)} more while it or newcomers download weights" if at_times else ""
    text = f"about {_gib(needed)} needed ({what}){more}, {_gib(free)} free"
    if TIGHT_SHARE * needed > free:
        return fail(topic, text, advice)
    return warn(topic, f"{text}: tight", advice) if needed + at_times > TIGHT_SHARE * free else ok(topic, text)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
