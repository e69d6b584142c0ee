"""Which buckets of the directory a peer writes and which it reads. Pure: no network, no clock.

At level L the directory has 2^L buckets. The first L bits of the hash of a peer's id name its bucket. Peers use the
level at which a bucket has about ``BUCKET_MEMBERS`` members, so a peer's traffic does not grow with the swarm. Each
peer estimates the swarm's size from the number of records in the buckets that it reads. These estimates differ a
little: so a peer writes to the levels below and above its estimate and reads at the nearer one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from math import ceil, floor, log2
from typing import NamedTuple

BUCKET_MEMBERS = 24  # members in a bucket
LAST_LEVEL = 20  # a swarm of 25 million members has it
READS = 3  # buckets a period
NEWCOMER_READS = 8  # buckets that a newcomer reads
ANCHORED = 2  # the deepest level that is also read and written at the anchors (p2p/dht/anchors.py)
NEAR_LOOKS = 4  # periods between two looks at the neighbouring levels
WIDE_LOOKS = 48  # between two looks at all levels
SIZE_SMOOTHING = 0.3
SETTLED_OCTAVES = 0.5  # octaves between the estimate and what was found, once the size is known: buckets are unlike


class Bucket(NamedTuple):
    """Number ``place`` of the 2^level buckets."""

    level: int
    place: int


def bucket_of(peer_id: str, level: int) -> Bucket:
    return Bucket(level, int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> (32 - level))


def writes(peer_id: str, members: float) -> list[Bucket]:
    """The buckets of a peer's record when it estimates so many ``members``."""
    exact = _level(members)
    return [bucket_of(peer_id, level) for level in sorted({floor(exact), ceil(exact)})]


def own_buckets(peer_id: str) -> list[Bucket]:
    """Wherever a peer's record may be."""
    return [bucket_of(peer_id, level) for level in range(LAST_LEVEL + 1)]


def reads(members: float, count: int, first: int) -> list[Bucket]:
    """``count`` buckets of the level, in turn from the place ``first`` on, or all if there are no more."""
    level = round(_level(members))
    return [Bucket(level, (first + it) % 2**level) for it in range(min(count, 2**level))]


class SwarmSize:
    """A peer's estimate of the number of members. Call ``look`` and ``learn`` once a period."""

    def __init__(self, members: float = 1.0) -> None:
        self.members, self._number, self._settled = members, 0, False
        self._first: int | None = None  # the place of the next bucket to read

    def look(self, count: int, chance: random.Random) -> list[Bucket]:
        """The buckets to read now: ``count`` of them, and one of each level that others may use.

        The former in turn: at random, one may not be read again before its records have expired. Once the size is known
        the latter are seldom read: most are empty, and an empty one costs many requests.
        """
        self._number += 1
        first = chance.randrange(2**LAST_LEVEL) if self._first is None else self._first
        buckets, self._first = reads(self.members, count, first), first + count
        if not self._probing:
            return buckets
        return buckets + probes(chance, self.members if self._number % WIDE_LOOKS else None)

    def learn(self, found: Mapping[Bucket, int]) -> None:
        """``found``: how many records of others the buckets of :meth:`look` had. Without other levels it says nothing
        about the size: a peer that uses another level is missing from one's own."""
        if not self._probing:
            return
        now = estimate(found)
        self._settled = abs(log2(now / self.members)) < SETTLED_OCTAVES
        self.members += SIZE_SMOOTHING * (now - self.members)

    @property
    def _probing(self) -> bool:
        return not self._settled or not self._number % NEAR_LOOKS


def probes(chance: random.Random, members: float | None = None) -> list[Bucket]:
    """One bucket of each level near that of ``members``, or of all levels: to find the levels that others use.

    Each time a random one. With the same one each time, a peer whose bucket has few members would take the swarm for
    small for ever, and would read a level to which most others do not write.
    """
    level = None if members is None else round(_level(members))
    levels = range(LAST_LEVEL + 1) if level is None else range(max(0, level - 1), min(LAST_LEVEL, level + 2) + 1)
    return [Bucket(level, chance.randrange(2**level)) for level in levels]


def estimate(found: Mapping[Bucket, int]) -> float:
    """Members of the swarm, from how many records of others each bucket has at the deepest level that is in use."""
    counts: dict[int, list[int]] = {}
    for bucket, count in found.items():
        counts.setdefault(bucket.level, []).append(count)
    full = {level: sum(all_of_it) / len(all_of_it) for level, all_of_it in counts.items()}
    used = [level for level, mean in full.items() if mean >= BUCKET_MEMBERS / 2]
    level = max(used) if used else max(full, key=lambda level: (full[level], level), default=0)
    return 1 + full.get(level, 0.0) * 2.0**level


def _level(members: float) -> float:
    return min(max(0.0, log2(max(members, 1.0) / BUCKET_MEMBERS)), float(LAST_LEVEL))
