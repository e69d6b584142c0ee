"""What each member shows to all others before a mean is used, and what contradicts it. Pure.

The table of member i in a group of n has

- a digest of the mean of each slice, as i holds it;
- a sketch (sketch.py) of each contribution to slice i, and of what was lost by rounding their mean;
- a sketch of each contribution that i has sent, by slice.

All of them together say whether each mean is the mean of what was sent, also if a member sends different means, or
shows different tables, to different members. Two members that say different things of the same bytes contradict each
other: one of them lies, and nobody else can know which.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peer.exchange.group.sketch import LOOSE, PROJECTIONS, ROUNDING, Sketch, factors
from peer.rounds.contribution import host_vector

HELD_BYTES = 16
HELD_WORDS = HELD_BYTES // 2  # a table is fp32, and holds 16 bits in each


class Contradiction(NamedTuple):
    """``text`` names member ``culprit`` as ``{0}``. It may have been the member ``other`` instead, ``{1}``."""

    text: str
    culprit: int
    other: int | None = None


class Shown(NamedTuple):
    """The table of one member of n. Rows are sketches.

    ``digests``: fp32 ``[n, HELD_WORDS]``. ``given``: n rows, and one of what was lost. ``sent``: n rows.
    """

    digests: np.ndarray
    given: np.ndarray
    sent: np.ndarray


def digest_of(vector: Tensor) -> bytes:
    """Of the bytes of a tensor on the host; nobody can find two tensors with the same one."""
    return hashlib.sha256(vector.numpy().data).digest()[:HELD_BYTES]


def digest_table(digests: Sequence[bytes]) -> Tensor:
    """fp32 ``[n × HELD_WORDS]``."""
    return torch.from_numpy(np.frombuffer(b"".join(digests), np.uint16).astype(np.float32))


def table(digests: Sequence[bytes], given: Sequence[Sketch], lost: Sketch, sent: Sequence[Sketch]) -> Tensor:
    """fp32, flat. The arguments: as in :class:`Shown`."""
    rows = np.concatenate([*given, lost, *sent])
    return torch.cat([digest_table(digests), torch.from_numpy(rows.astype(np.float32))])


def empty_table(members: int) -> Tensor:
    """Room for the :func:`table` of another member."""
    return host_vector(members * HELD_WORDS + (2 * members + 1) * (1 + PROJECTIONS))


def read_table(shown: Tensor, members: int) -> Shown:
    """The parts of a :func:`table`."""
    words = members * HELD_WORDS
    rows = shown[words:].double().numpy().reshape(-1, 1 + PROJECTIONS)
    return Shown(shown[:words].numpy().reshape(-1, HELD_WORDS), rows[: members + 1], rows[members + 1 :])


def held_apart(mine: Tensor, shown: Tensor, place: int, me: int) -> Contradiction | None:
    """Compares two results of :func:`digest_table`: this peer's own, and what the member at ``place`` shows."""
    apart = (mine != shown).view(-1, HELD_WORDS).any(1).nonzero().flatten().tolist()
    if not apart:
        return None
    sender = apart[0]
    if sender in (me, place):
        return Contradiction("{0} holds something else than was sent", place)
    return Contradiction("{0} has sent something else to {1}, or {1} says so", sender, place)


def contradiction(
    tables: Mapping[int, Shown], me: int, means: Sequence[Sketch], most_lost: float = 0.0
) -> Contradiction | None:
    """Why the means must not be used; ``None`` when they may.

    ``tables``: of all members by place, with this peer's own. ``means``: sketches of the slices that this peer holds.
    ``most_lost``: by rounding a mean, as a share of the mean norm of the contributions.
    """
    others = [place for place in sorted(tables) if place != me]
    for place in others:
        rows = np.concatenate([tables[place].given, tables[place].sent])
        if not np.isfinite(rows).all() or (rows[:, 0] < 0).any():
            return Contradiction("the sketches of {0} are no numbers", place)
    digests = {place: torch.from_numpy(tables[place].digests).flatten() for place in tables}
    for place in others:
        if apart := held_apart(digests[me], digests[place], place, me):
            return apart
    for place in others:
        if apart := _told_apart(tables, place, me):
            return apart
        if text := _no_mean(tables[place].given, place, means[place], most_lost):
            return Contradiction(text, place)
    return None


def _told_apart(tables: Mapping[int, Shown], place: int, me: int) -> Contradiction | None:
    """What the member at ``place`` has been given, by itself and by those who sent it."""
    given = tables[place].given
    if not _same(tables[me].given[place], tables[place].sent[me]):
        return Contradiction("{0} has sent this peer something else than it says", place)
    for sender, shown in tables.items():
        if sender == place or _same(given[sender], shown.sent[place]):
            continue
        if sender == me:
            return Contradiction("{0} has averaged something else than this peer has sent", place)
        return Contradiction("{0} has averaged something else than {1} has sent, or {1} says so", place, sender)
    return None


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= ROUNDING * max(one[0], other[0]))


def _no_mean(given: np.ndarray, place: int, mean: Sketch, most_lost: float) -> str:
    """Why the mean of slice ``place`` is not that of what its member shows; empty when it is."""
    rows, lost = given[:-1], given[-1]
    norms, projections = rows[:, 0], rows[:, 1:]
    if math.sqrt(np.square(projections[place]).mean()) > LOOSE * norms[place]:
        return "the contribution of {0} to its own mean is longer than it says"
    weights = np.array(factors(norms.tolist()))
    total = weights @ norms
    if max(lost[0], math.sqrt(np.square(lost[1:]).mean()) / LOOSE) > (most_lost / len(rows) + ROUNDING) * total:
        return "the mean from {0} is rounded by more than its bits explain"
    if np.abs(weights @ projections - len(rows) * (mean[1:] + lost[1:])).max() > ROUNDING * total:
        return "the mean from {0} is not the mean of what it shows"
    return ""
