"""Which device a replica computes on, and what that device offers.

A function says only what torch's modules for devices have in common from torch 2.6 on, or asks which of it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from peer.errors import UserError
from peer.process import cores

# What to do about an accelerator that is wanted and missing
_REMEDIES = {
    "cuda": "look at nvidia-smi, or rocm-smi for an AMD GPU, and install torch's build for it",
    "mps": "it is the GPU of a Mac with Apple silicon",
    "xpu": "look at xpu-smi and install torch's build for XPU",
}
# The variable that chooses among a machine's GPUs
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def pick_device(wish: str) -> torch.device:
    """The device for ``peer.device``. ``auto``: the accelerator that torch names, or the CPU.

    Raises :class:`UserError` for an accelerator that is not here.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = found.type if found is not None and found.type in _REMEDIES else "cpu"
    if wish not in ("auto", "cpu", here):
        other = "" if here == "cpu" else f"; peer.device: {here} is"
        raise UserError(f"peer.device: {wish} is not available here{other}; {_REMEDIES[wish]}, or use auto")
    return torch.device(here if wish == "auto" else wish)


def cpu_threads(wish: int | None) -> int:
    """For ``peer.threads``. torch's own choice sees no quota, and its threads would stand most of the time."""
    return wish or min(torch.get_num_threads(), cores())


def module_of(device: torch.device) -> Any:
    """torch's module for such devices, such as ``torch.xpu``. Their contents differ."""
    return torch.get_device_module(device)


def wants_bf16(precision: str, device: torch.device) -> bool:
    """Whether to use bf16 autocast. ``auto``: only if the device says that it computes in bf16 without emulation.

    Apple's says nothing. Intel's says nothing of emulation in early versions of torch.
    """
    if precision != "auto":
        return precision == "bf16"
    supported = None if device.type == "cpu" else getattr(module_of(device), "is_bf16_supported", None)
    if supported is None:
        return False
    try:
        return bool(supported(including_emulation=False))
    except TypeError:
        return bool(supported())


def groups_in_16_bits_only(device: torch.device) -> bool:
    """Do its kernels of attention take grouped keys and values in 16 bits only, and one of them fp32 without groups?"""
    return device.type == "cuda"


def attention_keeps_scores(device: torch.device) -> bool:
    """Does attention keep its scores of ``[B, H, T, T]`` for the backward pass, for which torch has no kernel there?"""
    return device.type == "mps"


@contextmanager
def without_autocast() -> Iterator[None]:
    """A program's autocast does not reach what this thread computes here: it rounds products of fp32 to 16 bits, and
    refuses to join tensors of the other 16-bit type. Where there is none, this takes about ten microseconds.
    """
    with ExitStack() as stack:
        for kind in ("cpu", *_REMEDIES):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def device_count(device: torch.device) -> int | None:
    """How many such devices this machine has; ``None`` for a CPU, which processes share."""
    return None if device.type == "cpu" else torch.accelerator.device_count()


def choosing_another(device: torch.device) -> str:
    """The setting by which a further peer on this machine uses its second GPU."""
    return f"{_VISIBLE.get(device.type, 'the variable of its driver')}=1"


def one_each(wish: str) -> list[dict[str, str]]:
    """For each accelerator of ``peer.device`` the environment in which a process sees that one alone.

    Empty where a process has no choice: with fewer than two, or on a CPU. Counting them makes no context on any.
    """
    device = pick_device(wish)
    variable, count = _VISIBLE.get(device.type), device_count(device) or 0
    if variable is None or count < 2:
        return []
    if torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ:  # there it has precedence
        variable = "HIP_VISIBLE_DEVICES"
    given = [entry.strip() for entry in os.environ.get(variable, "").split(",") if entry.strip()]
    return [{variable: entry} for entry in given[:count] or map(str, range(count))]


def random_state(device: torch.device) -> list[int] | None:
    """Of an accelerator's generator; a CPU's is torch's own."""
    return None if device.type == "cpu" else module_of(device).get_rng_state().tolist()


def set_random_state(device: torch.device, state: list[int] | None) -> None:
    """Restore :func:`random_state`. It is ignored on a CPU."""
    if state is not None and device.type != "cpu":
        module_of(device).set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


def connect_ranks(kind: str, number: int, timeout: timedelta) -> torch.device:
    """The device of rank ``number``, as the process's default, connected with the other ranks by torchrun's
    environment. ``timeout``: of every collective. Raises :class:`UserError` if this torch has no collectives for it.
    """
    backend = distributed.Backend.default_device_backend_map.get(kind, "")
    available = getattr(distributed, f"is_{backend}_available", None)
    if available is None or not available():
        what = f" ({backend})" if backend else ""
        raise UserError(
            f"torchrun: this torch has no collectives{what} for {kind}; start without torchrun, or use peer.device: cpu"
        )
    if kind == "cpu":
        distributed.init_process_group(backend, timeout=timeout)
        return torch.device(kind)
    device = torch.device(kind, number)
    torch.accelerator.set_device_index(number)
    distributed.init_process_group(backend, timeout=timeout, device_id=device)
    return device
