"""The average of dense contributions: reduce-scatter, then all-gather.

Member i averages slice i of the vector. Every other member sends it its slice i and receives the mean. So each member
sends 2 (n − 1) / n of the vector, whatever n.
"""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from peer.exchange.average import copy_own
from peer.exchange.deadline import together
from peer.exchange.group.flow_control import FlowControlledStream, turns
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.streams import GroupStreams
from peer.p2p.payload import receive_fp32, receive_parts
from peer.rounds.contribution import Contribution, Vector, as_bytes, parts, scratch


class AllReduceExchange(GroupProtocol[Contribution]):
    """The mean of all members' contributions."""

    def _take_own(self, contribution: Contribution) -> None:
        copy_own(contribution, self._buffer)

    async def _combine(self, own: Contribution, streams: GroupStreams) -> None:
        count, me, stall = len(streams.assembly.seats), streams.assembly.me, self._settings.stall
        borders = [own.numel * place // count for place in range(count + 1)]
        slices = [self._buffer[start:stop] for start, stop in pairwise(borders)]
        mine, reduced = slices[me], asyncio.Event()
        copy_own(_Slice(own, borders[me], borders[me + 1]), mine)
        own_norm = math.sqrt(_square(mine))
        streams.require(math.isfinite(own_norm), me, "the contribution of {} is not finite")
        norms: dict[int, float] = {}
        order = turns(own.numel * mine.element_size() // count)

        async def exchange(place: int) -> None:
            stream = FlowControlledStream(streams.by_place[place], stall)

            async def outward() -> None:
                await stream.send(_Slice(own, borders[place], borders[place + 1]), order)
                await stream.send(Vector(mine), order, ready=reduced)

            async def inward() -> None:
                norm = await _add(stream, mine, stall)
                streams.require(math.isfinite(norm), place, "the contribution of {} is not finite")
                norms[place] = norm  # after the check: another member's coroutine judges as soon as all are there
                stream.received()
                if len(norms) == count - 1:
                    _judge(norms, own_norm, streams, self._settings.max_norm_ratio)
                    mine.mul_(1 / count)
                    reduced.set()
                await receive_fp32(stream, slices[place], stall)
                finite = bool(torch.isfinite(slices[place]).all())
                streams.require(finite, place, "the mean from {} is not finite")
                stream.received()
                await stream.settle(2)

            await together([outward(), inward(), stream.acknowledge(2)])

        await streams.with_all(exchange)


async def _add(stream: FlowControlledStream, total: Tensor, stall: float) -> float:
    """``total`` += the payload on ``stream``; returns the norm of the payload."""
    square, room = 0.0, scratch(total.numel())
    borders = parts(total.numel())
    rooms = (as_bytes(room[: stop - start]) for start, stop in borders)
    async for number, _, _ in receive_parts(stream, rooms, stall):
        start, stop = borders[number]
        total[start:stop].add_(room[: stop - start])
        square += _square(room[: stop - start])
    return math.sqrt(square)


def _judge(norms: dict[int, float], own: float, streams: GroupStreams, ratio: float) -> None:
    """No norm may exceed ``ratio`` times the median of all; two members cannot tell. ``norms``: by place."""
    middle = median([*norms.values(), own])
    for place, norm in norms.items():
        sane = len(norms) < 2 or norm <= ratio * middle or middle == 0
        detail = f"the norm of {{}}, {norm:.4g}, is far above the median {middle:.4g}"
        streams.require(sane, place, detail)


def _square(part: Tensor) -> float:
    return float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2


class _Slice:
    """Elements ``start : stop`` of a contribution."""

    def __init__(self, whole: Contribution, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.numel = stop - start

    def read(self, start: int, out: Tensor) -> None:
        self._whole.read(self._start + start, out)
