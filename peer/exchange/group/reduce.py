"""The two ways in which a group averages, over the verified streams of a mesh.

All-reduce, for what every member has in full: member i averages part i of the vector. Everybody sends it part i
(reduce-scatter), it sends the mean back (all-gather). So each member sends 2 (n − 1) / n of the vector, whatever n.
All-gather, for sparse contributions: they are small, so everybody sends all of its own to everybody.
"""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from statistics import median
from typing import cast

import torch
import xxhash
from torch import Tensor

from peer.exchange.average import mean_of_senders
from peer.exchange.group.lane import Lane, turns
from peer.exchange.group.mesh import Mesh, together
from peer.exchange.group.wire import Failed, pack, unpack
from peer.p2p.payload import DIGEST_BYTES, Channel, receive_payload
from peer.rounds.contribution import Contribution, Sparse
from peer.rounds.types import Outcome
from peer.rounds.vectors import Vector, parts, scratch


async def all_reduce(own: Contribution, mesh: Mesh, out: Tensor, *, stall: float, max_norm_ratio: float) -> None:
    """``out`` ← mean of the members' contributions (flat fp32). Raises :class:`Failed`; then ``out`` is garbage.

    ``stall``: seconds without a byte on a stream.
    """
    count, me = len(mesh.assembly.seats), mesh.assembly.me
    borders = [own.numel * place // count for place in range(count + 1)]
    shares = [out[start:stop] for start, stop in pairwise(borders)]
    mine = shares[me]
    own_square = _read(own, borders[me], mine)
    squares: dict[int, float] = {}
    reduced, order = asyncio.Event(), turns(4 * own.numel // count)

    async def exchange(place: int) -> None:
        lane = Lane(mesh.streams[place], stall)

        async def outward() -> None:
            await lane.send(_Slice(own, borders[place], borders[place + 1]), order)
            await lane.send(Vector(mine), order, ready=reduced)

        async def inward() -> None:
            squares[place] = await _add(lane, mine, stall, mesh, place)
            lane.received()
            if len(squares) == count - 1:
                _judge(squares, own_square, mesh, max_norm_ratio)
                mine.mul_(1 / count)
                reduced.set()
            intact = await receive_payload(lane, shares[place], stall)
            _require(intact, mesh, place, Outcome.CORRUPT, "the mean from {} does not match its digest")
            _require(_finite(shares[place]), mesh, place, Outcome.POISONED, "the mean from {} is not finite")
            lane.received()
            await lane.settle(2)

        await together([outward(), inward(), lane.acknowledge(2)])

    await mesh.with_all(exchange)


async def all_gather(own: Sparse, mesh: Mesh, out: Tensor, *, stall: float) -> None:
    """``out`` ← each element's mean over the members that sent it, zero elsewhere. Raises :class:`Failed`."""
    packed = pack(own)
    order = turns(4 * packed.numel())

    async def swap(place: int) -> Sparse:
        lane, room = Lane(mesh.streams[place], stall), torch.empty_like(packed)

        async def inward() -> Sparse:
            intact = await receive_payload(lane, room, stall)
            _require(intact, mesh, place, Outcome.CORRUPT, "the payload of {} does not match its digest")
            lane.received()
            theirs = unpack(room, own)
            fits = int(theirs.positions.max()) < own.numel
            _require(fits, mesh, place, Outcome.POISONED, "{} sent a coefficient that the model does not have")
            _require(_finite(theirs.values), mesh, place, Outcome.POISONED, "the contribution of {} is not finite")
            await lane.settle(1)
            return theirs

        works = [inward(), lane.send(Vector(packed), order), lane.acknowledge(1)]
        return cast(Sparse, (await together(works))[0])

    by_place = {mesh.assembly.me: own, **await mesh.with_all(swap)}
    await asyncio.to_thread(mean_of_senders, [by_place[place] for place in sorted(by_place)], out)


def _read(own: Contribution, begin: int, out: Tensor) -> float:
    for start, stop in parts(out.numel()):
        own.read(begin + start, out[start:stop])
    return _square(out)


async def _add(stream: Channel, total: Tensor, stall: float, mesh: Mesh, place: int) -> float:
    """``total`` += what comes on ``stream``; returns its squared norm."""
    digest, square = xxhash.xxh3_128(), 0.0
    room = scratch(total.numel())
    view = memoryview(room.numpy().data).cast("B")
    for start, stop in parts(total.numel()):
        piece = view[: 4 * (stop - start)]
        await stream.read_into(piece, stall)
        digest.update(piece)
        total[start:stop].add_(room[: stop - start])
        square += _square(room[: stop - start])
    sent = bytearray(DIGEST_BYTES)
    await stream.read_into(memoryview(sent), stall)
    intact = bytes(sent) == digest.digest()
    _require(intact, mesh, place, Outcome.CORRUPT, "the payload of {} does not match its digest")
    _require(math.isfinite(square), mesh, place, Outcome.POISONED, "the contribution of {} is not finite")
    return square


def _judge(squares: dict[int, float], own: float, mesh: Mesh, ratio: float) -> None:
    """Nobody's share may be ``ratio`` times longer than the median of all. With two members nobody can tell."""
    norms = {place: math.sqrt(square) for place, square in squares.items()}
    middle = median([*norms.values(), math.sqrt(own)])
    for place, norm in norms.items():
        sane = len(norms) < 2 or norm <= ratio * middle or middle == 0
        _require(
            sane, mesh, place, Outcome.POISONED, f"the norm of {{}}, {norm:.4g}, is far above the median {middle:.4g}"
        )


def _require(condition: bool, mesh: Mesh, place: int, outcome: Outcome, words: str) -> None:
    if not condition:
        raise Failed(place, outcome, words.format(mesh.assembly.seats[place].name))


def _square(part: Tensor) -> float:
    return float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2


def _finite(part: Tensor) -> bool:
    return bool(torch.isfinite(part).all())


class _Slice:
    """Elements ``start : stop`` of a contribution."""

    def __init__(self, whole: Contribution, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.numel = stop - start

    def read(self, start: int, out: Tensor) -> None:
        self._whole.read(self._start + start, out)
