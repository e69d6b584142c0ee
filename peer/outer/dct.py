"""The chunked cosine transform of the decoupled method.

A parameter is cut into chunks as a matrix: its first axis by all others; a vector is one row. The side of a chunk is
the largest divisor of the axis up to ``chunk``, as in the authors' code. Where that divisor is less than half of
``chunk`` (257 is prime), chunks have the full side and the matrix is padded with zeros: of a very small chunk even one
coefficient is a large share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from peer.outer.slow_weights import SlowWeights, Span
from peer.rounds.contribution import host_vector


@dataclass(frozen=True)
class Tiling:
    """How one parameter is cut: ``rows × columns`` padded to whole chunks of ``height × width``.

    Its coefficients are ``start : stop`` of the vector of all coefficients, chunk by chunk; ``keep`` of each are sent.
    """

    span: Span
    rows: int
    columns: int
    height: int
    width: int
    keep: int
    start: int

    @property
    def chunks(self) -> int:
        return math.ceil(self.rows / self.height) * math.ceil(self.columns / self.width)

    @property
    def stop(self) -> int:
        return self.start + self.chunks * self.height * self.width

    def forward(self, flat: Tensor) -> Tensor:
        """Orthonormal DCT-II: ``flat`` (the span's elements) to coefficients ``[chunks, height · width]``, fp32."""
        down, across = math.ceil(self.rows / self.height), math.ceil(self.columns / self.width)
        matrix = host_vector(down * self.height * across * self.width).view(down * self.height, -1).zero_()
        matrix[: self.rows, : self.columns] = flat.view(self.rows, self.columns)
        tiles = matrix.view(down, self.height, across, self.width).transpose(1, 2)
        return (basis(self.height) @ tiles @ basis(self.width).T).reshape(self.chunks, -1)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """The span's elements, flat, of coefficients shaped as :meth:`forward` returns them."""
        down, across = math.ceil(self.rows / self.height), math.ceil(self.columns / self.width)
        tiles = coefficients.view(down, across, self.height, self.width)
        matrix = (basis(self.height).T @ tiles @ basis(self.width)).transpose(1, 2)
        return matrix.reshape(down * self.height, -1)[: self.rows, : self.columns].reshape(-1)


def tilings(slow: SlowWeights, chunk: int, density: float) -> list[Tiling]:
    """The tiling of every parameter, in the order of the flat vector. Equal on all peers with equal models."""
    out: list[Tiling] = []
    start = 0
    for span in slow.spans:
        shape = span.parameter.shape
        if not shape.numel():
            continue
        rows, columns = (shape[0], span.parameter.numel() // shape[0]) if len(shape) > 1 else (1, shape.numel())
        height, width = _side(rows, chunk), _side(columns, chunk)
        keep = max(1, round(density * height * width))
        out.append(Tiling(span, rows, columns, height, width, keep, start))
        start = out[-1].stop
    return out


def _side(axis: int, chunk: int) -> int:
    if axis <= chunk:
        return axis
    divisor = max(side for side in range(1, chunk + 1) if axis % side == 0)
    return divisor if 2 * divisor >= chunk else chunk


@cache
def basis(side: int) -> Tensor:
    """Matrix C of the orthonormal DCT-II, fp32 ``[side, side]``: C @ x transforms, C.T @ X inverts it."""
    frequency = torch.arange(side, dtype=torch.float64, device="cpu")[:, None]
    place = torch.arange(side, dtype=torch.float64, device="cpu")[None, :]
    matrix = torch.cos(math.pi * (place + 0.5) * frequency / side) * math.sqrt(2 / side)
    matrix[0] /= math.sqrt(2)
    return matrix.float()
