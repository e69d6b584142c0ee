"""Is the mean of a slice its mean? Each member shows sketches of what it sent and averaged, and all check them.

A sketch of a vector x is :data:`PROJECTIONS` random projections ⟨r, x⟩ with signs r (Alon, Matias and Szegedy, 1996):
it is linear in x, and its mean square is near ‖x‖². The signs come from the digests of all means, so nobody knows them
before all means are fixed. What a member shows of a contribution must be what its sender shows of it (shown.py), and
these rows must add up to the mean and what was lost by rounding it, which has a row of its own. Only that row and the
one of who averaged are compared with nothing but their norms: the first may have a share of the contributions'
(rounding.py), the second is clipped as all norms are. So a false mean passes when it changes the model by at most
:data:`LOOSE` times what a false contribution and the rounding can, in a group of three or more. Who averages last can
try many means for signs that suit it: 32 projections make a large gain improbable.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor

from peer.rounds.contribution import Readable, host_vector, norm

PROJECTIONS = 32  # with these the mean square is within a quarter of ‖x‖², as a rule
LONGEST_CONTRIBUTION = 1.5  # times the median norm of the contributions to a slice
LOOSE = 2.0  # times its norm: so long may a contribution be by its sketch
ROUNDING = 1e-4  # of the norms: fp32 sums were off by at most 6e-7 (8 members, 4M elements)
WIDTH = 4093  # of a matrix of elements; a prime, so that no weight matrix is one of its rows
HEIGHT = 256  # rows that are read at once: whole blocks of a codec

Sketch = np.ndarray  # ‖x‖ and the projections: fp64 ``[1 + PROJECTIONS]``
NOTHING_LOST: Sketch = np.zeros(1 + PROJECTIONS)  # of zeros


class Sketches:
    """Of vectors of ``numel`` elements, with the signs of ``seed``."""

    def __init__(self, seed: str, numel: int) -> None:
        # r is the outer product of two sign vectors: a matrix of elements is multiplied from both sides
        self._width = max(1, min(WIDTH, numel))
        # fp64: a program may let torch multiply fp32 in fewer bits. numpy would multiply with all cores.
        self._across = _signs(f"{seed} across", self._width).double()
        self._down = _signs(f"{seed} down", math.ceil(numel / self._width))

    def of(self, vector: Readable) -> Sketch:
        """Reads the vector once, part by part."""
        width, height = self._width, min(HEIGHT, len(self._down))
        room, squares = host_vector(height * width), 0.0
        projections = torch.zeros(PROJECTIONS, dtype=torch.float64, device="cpu")
        matrix = torch.empty(height, width, dtype=torch.float64, device="cpu")
        for first in range(0, len(self._down), HEIGHT):
            start, down = first * width, self._down[first : first + HEIGHT]
            part = room[: min(vector.numel - start, len(room))]
            vector.read(start, part)
            room[len(part) :] = 0
            squares += norm(part) ** 2
            matrix.copy_(room.view(height, width))
            projections += ((matrix[: len(down)] @ self._across) * down).sum(0)
        return np.concatenate([[math.sqrt(squares)], projections.numpy()])


def factors(norms: Sequence[float]) -> list[float]:
    """By what each contribution is multiplied before it counts. Two members cannot tell which of them is unusual."""
    reach = LONGEST_CONTRIBUTION * median(norms) if len(norms) > 2 else 0.0
    return [min(1.0, reach / norm) if reach and norm else 1.0 for norm in norms]


def _signs(seed: str, rows: int) -> Tensor:
    """±1, fp32 ``[rows, PROJECTIONS]``: the same on every machine."""
    drawn = hashlib.shake_256(seed.encode()).digest(rows * PROJECTIONS // 8)
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8)).reshape(rows, PROJECTIONS)
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)
