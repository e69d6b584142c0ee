"""Is the mean of a slice its mean? Who averaged it shows a sketch of what each member sent, and every member checks it.

A sketch of a vector x is :data:`PROJECTIONS` random projections ⟨r, x⟩ with signs r (Alon, Matias and Szegedy, 1996):
it is linear in x, and its mean square is near ‖x‖². The signs come from the digest of the whole result, so nobody knows
them before all means are fixed. A member's own row must be that of what it has sent, and the rows must add up to the
mean and what was lost by rounding it, which has a row of its own. Only that row and the one of who averaged are
compared with nothing but their norms: the first may have a share of the contributions' (rounding.py), the second is
clipped as all norms are. So a false mean passes when it changes the model by at most :data:`LOOSE` times what a false
contribution and the rounding can, in a group of three or more. Who averages last can try many means for signs that suit
it: 32 projections make a large gain improbable.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peer.rounds.contribution import Readable, host_vector

PROJECTIONS = 32  # with these the mean square is within a quarter of ‖x‖², as a rule
LONGEST_CONTRIBUTION = 1.5  # times the median norm of the contributions to a slice
LOOSE = 2.0  # times its norm: so long may a contribution be by its sketch
ROUNDING = 1e-4  # of the norms: fp32 sums were off by at most 6e-7 (8 members, 4M elements)
WIDTH = 4093  # of a matrix of elements; a prime, so that no weight matrix is one of its rows
HEIGHT = 256  # rows that are read at once: whole blocks of a codec
DIGEST_PLACES = 8  # of 16 bits each


class Sketch(NamedTuple):
    """``norm``: ‖x‖; ``projections``: fp64 ``[PROJECTIONS]``."""

    norm: float
    projections: np.ndarray

    def row(self) -> np.ndarray:
        """Norm and projections, fp64 ``[1 + PROJECTIONS]``."""
        return np.concatenate([[self.norm], self.projections])


NOTHING_LOST = Sketch(0.0, np.zeros(PROJECTIONS))  # of zeros


class Sketches:
    """Of vectors of ``numel`` elements, with the signs of ``seed``."""

    def __init__(self, seed: str, numel: int) -> None:
        # r is the outer product of two sign vectors: a matrix of elements is multiplied from both sides
        self._width = max(1, min(WIDTH, numel))
        self._across = _signs(f"{seed} across", self._width)
        self._down = _signs(f"{seed} down", math.ceil(numel / self._width))

    def of(self, vector: Readable) -> Sketch:
        """Reads the vector once, part by part."""
        width, height = self._width, min(HEIGHT, len(self._down))
        room, square, projections = host_vector(height * width), 0.0, np.zeros(PROJECTIONS)
        for first in range(0, len(self._down), HEIGHT):
            start, down = first * width, self._down[first : first + HEIGHT]
            part = room[: min(vector.numel - start, len(room))]
            vector.read(start, part)
            room[len(part) :] = 0
            square += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
            matrix = room.numpy().reshape(height, width)[: len(down)]
            projections += ((matrix @ self._across) * down).sum(0, dtype=np.float64)
        return Sketch(math.sqrt(square), projections)


def factors(norms: Sequence[float]) -> list[float]:
    """By what each contribution is multiplied before it counts; see :data:`LONGEST_CONTRIBUTION`.

    Two members cannot tell which of them is unusual.
    """
    reach = LONGEST_CONTRIBUTION * median(norms) if len(norms) > 2 else 0.0
    return [min(1.0, reach / norm) if reach and norm else 1.0 for norm in norms]


def table(digest: str, sketches: Sequence[Sketch], lost: Sketch) -> Tensor:
    """fp32: the digest of the whole result (hex, 128 bits), then the sketch of each member's contribution, and of what
    was ``lost`` by rounding their mean.
    """
    rows = [sketch.row() for sketch in (*sketches, lost)]
    return torch.from_numpy(np.concatenate([_words(digest), *rows]).astype(np.float32))


def empty_table(members: int) -> Tensor:
    """Room for the :func:`table` of another member."""
    return host_vector(DIGEST_PLACES + (members + 1) * (1 + PROJECTIONS))


def objection(
    shown: Tensor, digest: str, place: int, me: int, sent: Sketch, mean: Sketch, most_lost: float = 0.0
) -> str:
    """Why the mean of slice ``place`` must not be used, by the :func:`table` of who averaged it; empty if it may.

    ``sent``: of this peer's contribution to the slice. ``most_lost``: by rounding the mean, as a share of the mean norm
    of the contributions.
    """
    if not np.array_equal(shown[:DIGEST_PLACES].numpy(), _words(digest)):
        return "the result of {} differs from this peer's"  # a leader may say that all are equal
    table_rows = shown[DIGEST_PLACES:].double().numpy().reshape(-1, 1 + PROJECTIONS)
    rows, lost = table_rows[:-1], table_rows[-1]
    norms, projections = rows[:, 0], rows[:, 1:]
    if not np.isfinite(table_rows).all() or (table_rows[:, 0] < 0).any():
        return "the sketches of {} are no numbers"
    if np.abs(rows[me] - sent.row()).max() > ROUNDING * sent.norm:
        return "{} has averaged something else than this peer has sent"
    if math.sqrt(np.square(projections[place]).mean()) > LOOSE * norms[place]:
        return "the contribution of {} to its own mean is longer than it says"
    weights = np.array(factors(norms.tolist()))
    total = weights @ norms
    if max(lost[0], math.sqrt(np.square(lost[1:]).mean()) / LOOSE) > (most_lost / len(rows) + ROUNDING) * total:
        return "the mean from {} is rounded by more than its bits explain"
    if np.abs(weights @ projections - len(rows) * (mean.projections + lost[1:])).max() > ROUNDING * total:
        return "the mean from {} is not the mean of what it shows"
    return ""


def _words(digest: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(digest), np.uint16).astype(np.float32)


def _signs(seed: str, rows: int) -> np.ndarray:
    """±1, fp32 ``[rows, PROJECTIONS]``: the same on every machine."""
    drawn = hashlib.shake_256(seed.encode()).digest(rows * PROJECTIONS // 8)
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8)).reshape(rows, PROJECTIONS)
    signs: np.ndarray = bits.astype(np.float32) * 2 - 1
    return signs
