"""The two ways in which a group averages, over the verified streams of a mesh.

All-reduce, for what every member has in full: member i averages part i of the vector. Everybody sends it part i
(reduce-scatter), it sends the mean back (all-gather). So each member sends 2 (n − 1) / n of the vector, whatever n.
All-gather, for sparse contributions: they are small, so everybody sends all of its own to everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar, cast

import torch
import xxhash
from torch import Tensor

from peer.exchange.average import mean_of_senders
from peer.exchange.group_wire import Failed, pack, unpack
from peer.exchange.mesh import Mesh, together
from peer.payload import DIGEST_BYTES, receive_payload, send_payload
from peer.rounds import Contribution, Outcome, Readable, Sparse
from peer.streams import BadMessage, Stream
from peer.vectors import Vector, parts, scratch

T = TypeVar("T")
NOT_YET, NOW = b"\0", b"\1"
SIGNS = 4  # of life within the time after which a silent stream is given up


async def all_reduce(own: Contribution, mesh: Mesh, out: Tensor, *, stall: float, max_norm_ratio: float) -> None:
    """``out`` ← mean of the members' contributions (flat fp32). Raises :class:`Failed`; then ``out`` is garbage.

    ``stall``: seconds without a byte on a stream. On slow links members are done with the first half far apart: who
    waits for others says so on the streams that have nothing else to carry.
    """
    count, me = len(mesh.assembly.seats), mesh.assembly.me
    borders = [own.numel * place // count for place in range(count + 1)]
    shares = [out[start:stop] for start, stop in pairwise(borders)]
    mine = shares[me]
    own_square = _read(own, borders[me], mine)
    squares: dict[int, float] = {}
    reduced = asyncio.Event()

    async def exchange(place: int) -> None:
        stream = mesh.streams[place]
        scatter = send_payload(stream, _Slice(own, borders[place], borders[place + 1]), stall)
        squares[place] = await _both(scatter, _add(stream, mine, stall, mesh, place))
        if len(squares) == count - 1:
            _judge(squares, own_square, mesh, max_norm_ratio)
            mine.mul_(1 / count)
            reduced.set()
        intact = await _both(
            _send_when(reduced, stream, Vector(mine), stall), _receive_when_sent(stream, shares[place], stall)
        )
        _require(intact, mesh, place, Outcome.CORRUPT, "the mean from {} does not match its digest")
        _require(_finite(shares[place]), mesh, place, Outcome.POISONED, "the mean from {} is not finite")

    await mesh.with_all(exchange)


async def _send_when(ready: asyncio.Event, stream: Stream, contribution: Readable, stall: float) -> None:
    """Send a payload once it is there, and a sign of life until then."""
    while not ready.is_set():
        await stream.write(NOT_YET, stall)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stall / SIGNS):
                await ready.wait()
    await stream.write(NOW, stall)
    await send_payload(stream, contribution, stall)


async def _receive_when_sent(stream: Stream, out: Tensor, stall: float) -> bool:
    """As :func:`receive_payload`, of what the other side sends with :func:`_send_when`."""
    sign = memoryview(bytearray(NOT_YET))
    while sign == NOT_YET:
        await stream.read_into(sign, stall)
    if sign != NOW:
        raise BadMessage("neither its mean nor a sign that it waits")
    return await receive_payload(stream, out, stall)


async def all_gather(own: Sparse, mesh: Mesh, out: Tensor, *, stall: float) -> None:
    """``out`` ← each element's mean over the members that sent it, zero elsewhere. Raises :class:`Failed`."""
    packed = pack(own)

    async def swap(place: int) -> Sparse:
        stream, room = mesh.streams[place], torch.empty_like(packed)
        sending = send_payload(stream, Vector(packed), stall)
        intact = await _both(sending, receive_payload(stream, room, stall))
        _require(intact, mesh, place, Outcome.CORRUPT, "the payload of {} does not match its digest")
        theirs = unpack(room, own)
        fits = int(theirs.positions.max()) < own.numel
        _require(fits, mesh, place, Outcome.POISONED, "{} sent a coefficient that the model does not have")
        _require(_finite(theirs.values), mesh, place, Outcome.POISONED, "the contribution of {} is not finite")
        return theirs

    by_place = {mesh.assembly.me: own, **await mesh.with_all(swap)}
    await asyncio.to_thread(mean_of_senders, [by_place[place] for place in sorted(by_place)], out)


def _read(own: Contribution, begin: int, out: Tensor) -> float:
    for start, stop in parts(out.numel()):
        own.read(begin + start, out[start:stop])
    return _square(out)


async def _add(stream: Stream, total: Tensor, stall: float, mesh: Mesh, place: int) -> float:
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


async def _both(sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, T]) -> T:
    """Both directions of a stream at once; returns what was received."""
    _, received = await together([sending, receiving])
    return cast(T, received)


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
