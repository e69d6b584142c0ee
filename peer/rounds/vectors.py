"""Flat host vectors, part by part: no copy is longer than 1 MiB."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PART = 256 * 1024  # elements of fp32: 1 MiB, the size at which the p2p daemon is fastest


def parts(numel: int) -> Iterator[tuple[int, int]]:
    """Borders ``(start, stop)`` of the parts of a vector of ``numel`` elements; with none it has one empty part."""
    return ((start, min(start + PART, numel)) for start in range(0, max(numel, 1), PART))


def scratch(numel: int) -> Tensor:
    """Room for one part, fp32 on the host."""
    return torch.empty(min(PART, numel), dtype=torch.float32)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, to read and to write, without a copy."""
    return memoryview(tensor.numpy().data).cast("B")


class Vector:
    """A tensor as a contribution. 1-D fp32 on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.numel = tensor.numel()

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self._tensor[start : start + out.numel()])

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        change.copy_(out)
