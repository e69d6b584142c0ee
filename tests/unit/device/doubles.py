"""Accelerators that are not here: what torch says of each, for the code that asks. Nothing is computed on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30
FREE, TOTAL, PEAK = 3 * GIB, 8 * GIB, GIB


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(name="Example 8", total_memory=TOTAL)


class Gpu(SimpleNamespace):
    """As ``torch.cuda`` and ``torch.xpu``. ``bf16``: natively; a newer torch emulates it everywhere."""

    def __init__(self, bf16: bool = True) -> None:
        super().__init__(
            is_bf16_supported=lambda including_emulation=True: bf16 or including_emulation,
            get_device_properties=_properties,
            mem_get_info=lambda device=None: (FREE, TOTAL),
            max_memory_allocated=lambda device=None: PEAK,
            get_rng_state=lambda: self.random,
            set_rng_state=self._set,
            random=torch.tensor([1, 2, 3], dtype=torch.uint8),
            _initialized=False,
        )

    def _set(self, state: torch.Tensor) -> None:
        self.random = state


class FirstXpu(Gpu):
    """As ``torch.xpu`` in torch 2.6, which knew no emulation."""

    def __init__(self) -> None:
        super().__init__()
        self.is_bf16_supported = lambda: True


class Mps(SimpleNamespace):
    """As ``torch.mps``: no streams, no peak, no word on bf16."""

    def __init__(self) -> None:
        super().__init__(
            recommended_max_memory=lambda: TOTAL,
            driver_allocated_memory=lambda: TOTAL - FREE,
            current_allocated_memory=lambda: PEAK,
            get_rng_state=lambda: torch.zeros(1, dtype=torch.uint8),
        )


MODULES = {"cuda": Gpu, "xpu": Gpu, "mps": Mps}


def plug_in(monkeypatch: pytest.MonkeyPatch, kind: str | None, module: Any = None, count: int = 1) -> Any:
    """This machine has ``count`` accelerators of a kind from now on, or none. Returns their module."""
    module = MODULES[kind]() if kind and module is None else module
    for name, function in {
        "is_available": lambda: kind is not None,
        "current_accelerator": lambda check_available=False: torch.device(kind) if kind else None,
        "device_count": lambda: count if kind else 0,
        "set_device_index": lambda number: monkeypatch.setattr(module, "current", number, raising=False),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    if kind:
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module
