"""The memory of an accelerator in bytes, and how it ends. A CPU's memory is the host's: see commands/check."""

from __future__ import annotations

from typing import NamedTuple

import torch

from peer.device.accelerator import module_of

# Resident bytes of a process with all libraries loaded, measured on a CPU with two builds of torch 2.13. The builds for
# XPU and MPS are not measured.
PROCESS_BYTES = (890 if torch.backends.cuda.is_built() else 436) * 2**20
# Bytes that an allocator holds for activations, divided by live bytes; the rest is fragmentation. The C library's value
# was measured on three sizes of model. An accelerator's is CUDA's usual value.
_HOST_SLACK, _DEVICE_SLACK = 1.6, 1.1
_OF_DRIVER = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",  # of its handle, at the first matrix product
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED",
    "HIP error: out of memory",
)
_OUT_OF_MEMORY = ("MPS backend out of memory", *_OF_DRIVER)
_CONTEXT_BYTES = 500 * 2**20  # of a GPU for its driver and libraries: CUDA's usual value


class DeviceMemory(NamedTuple):
    """Of an accelerator. ``free``: of other programs too; with MPS what it advises to use less what this one uses."""

    name: str
    total: int
    free: int


def device_memory(device: torch.device) -> DeviceMemory:
    """What the driver of an accelerator says now."""
    module = module_of(device)
    if not hasattr(module, "mem_get_info"):
        total = module.recommended_max_memory()
        return DeviceMemory("Apple GPU", total, max(0, total - module.driver_allocated_memory()))
    properties = module.get_device_properties(device)
    return DeviceMemory(properties.name, properties.total_memory, module.mem_get_info(device)[0])


def peak_bytes(device: torch.device) -> int:
    """What torch has allocated at most of an accelerator; with MPS, which keeps no peak, what it has now."""
    module = module_of(device)
    if not hasattr(module, "max_memory_allocated"):
        return int(module.current_allocated_memory())
    return int(module.max_memory_allocated(device))


def shares_host_memory(device: torch.device) -> bool:
    """Are the device's memory and the host's the same chips?"""
    return device.type in ("cpu", "mps")


def allocator_slack(device: torch.device) -> float:
    """Bytes held for activations, divided by live bytes."""
    return _HOST_SLACK if device.type == "cpu" else _DEVICE_SLACK


def context_bytes(device: torch.device) -> int:
    """Bytes of the device before anything is allocated."""
    return 0 if device.type == "cpu" else _CONTEXT_BYTES


def is_out_of_memory(error: BaseException) -> bool:
    """Has an accelerator no memory left, or the host none for its copies? MPS, and CUDA where torch's allocator has no
    part in it, raise another ``RuntimeError``.
    """
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and str(error).startswith(_OUT_OF_MEMORY)
    )


def is_of_driver(error: BaseException) -> bool:
    """Has this end of memory come past torch's allocator? Then the peer's tensors need not be the reason: pinned memory
    is the host's, and a context or a library takes what other programs have left.
    """
    return str(error).startswith(_OF_DRIVER)


def release_memory(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to ``device``."""
    if device.type != "cpu":
        module_of(device).empty_cache()
