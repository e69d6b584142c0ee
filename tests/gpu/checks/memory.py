"""What a peer takes against what `noloco-peer check` says, for the preset of 125M and for a larger one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from peer.config import load
from peer.config.schema import Config
from peer.replica.memory import Memory, estimate
from tests.gpu.site import CONFIGS, DEMO, ROOT, Finding, Site, no_network

WITHIN = 0.15  # of the estimate, as `check` assumes
GIB = 2**30
SECONDS = 240  # for a process


@dataclass(frozen=True)
class Case:
    """``saves``: with a checkpoint, which takes host memory and, of a large model, minutes of disk."""

    name: str
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    saves: bool = True


METHOD = CONFIGS / "methods" / "noloco.yaml"
SIZES = ("run.batch_size=16", "run.evaluation.batches=1")
OFFLOAD = "peer.offload=optimizer"
GROUPED = ("run.model.kv_heads=4", "run.data.sequence_length=2048", "peer.micro_batch=1", "peer.precision=fp32")
OF_125M = (CONFIGS / "models" / "llama-125m.yaml", METHOD)
PRESETS = (
    Case("125M", OF_125M, SIZES),
    Case("125M, grouped heads in fp32", OF_125M, ("run.batch_size=2", *GROUPED, *SIZES[1:]), saves=False),
    Case("1.1B", (CONFIGS / "models" / "llama-1.1b.yaml", METHOD), SIZES, saves=False),
    Case("1.1B, offloaded", (CONFIGS / "models" / "llama-1.1b.yaml", METHOD), (*SIZES, OFFLOAD), saves=False),
)
LARGER = ("run.model.hidden_size=256", "run.model.intermediate_size=688", "run.data.sequence_length=256")
ON_CPU = (
    Case("1M", (DEMO,), ()),
    Case("4M", (DEMO,), (*LARGER, "run.evaluation.batches=1"), saves=False),
    Case("4M, offloaded", (DEMO,), (*LARGER, "run.evaluation.batches=1", OFFLOAD), saves=False),
)


def check(site: Site) -> Iterator[Finding]:
    for case in PRESETS if site.accelerator else ON_CPU:
        overrides = (*case.overrides, f"peer.device={site.device.type}", "run.exchange.overlap=false")
        yield _used(site, case, load.load(list(case.files), list(overrides), environment={}), overrides)


def _used(site: Site, case: Case, config: Config, overrides: tuple[str, ...]) -> Finding:
    subject, needed = f"memory of {case.name}", estimate(config.run, config.peer)
    before = 0
    if site.accelerator:
        site.synchronize()
        site.free()
        before = torch.cuda.mem_get_info(site.device)[0]
        if needed.device_bytes * (1 + WITHIN) > before:
            words = f"it needs {needed.device_bytes / GIB:.1f} GiB of the device, {before / GIB:.1f} are free"
            return Finding(subject, None, words)
    flags = () if case.saves else ("--no-checkpoint",)
    program = [sys.executable, "-m", "tests.unit.replica.memory_peer", *map(str, case.files), *overrides, *flags]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        return Finding(subject, False, (done.stderr.strip().splitlines() or ["no output"])[-1])
    return judged(subject, needed, case.saves, before, json.loads(done.stdout.splitlines()[-1]))


def judged(subject: str, needed: Memory, saved: bool, before: int, used: dict[str, int]) -> Finding:
    """``before``: free bytes of the device before the process started; 0 without an accelerator."""
    host = needed.host_bytes - (0 if saved else needed.parts["checkpoint"])
    if not before:
        host += needed.device_bytes
        figures = {"host_estimate": host, "host_used": used["resident"]}
        # The estimate counts all libraries of a peer: without hivemind's it is judged from above only.
        least = 0 if no_network() else (1 - WITHIN) * host
        right = least <= used["resident"] <= (1 + WITHIN) * host
        return Finding(subject, right, f"{used['resident'] / GIB:.2f} GiB, {host / GIB:.2f} were estimated", figures)
    device = before - used["free"]
    figures = {
        "device_estimate": needed.device_bytes,
        "device_used": device,
        "device_held_by_torch": used["held"],
        "host_estimate": host,
        "host_used": used["resident"],
    }
    # The host's is judged from above only: whether pinned memory counts as resident depends on the driver.
    right = abs(device / needed.device_bytes - 1) <= WITHIN and used["resident"] <= (1 + WITHIN) * host
    words = (
        f"device {device / GIB:.2f} GiB, {needed.device_bytes / GIB:.2f} were estimated; "
        f"host {used['resident'] / GIB:.2f} GiB, {host / GIB:.2f} were estimated"
    )
    return Finding(subject, right, words, figures)
