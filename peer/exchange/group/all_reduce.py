"""The average of dense contributions: reduce-scatter, then all-gather, then a check of the means.

Member i averages slice i of the vector. Every other member sends it its slice i, receives the mean, and checks it by
what all members show of it (shown.py). So each member sends 2 (n − 1) / n of the vector, whatever n, both times with
the bits of the codec (rounding.py), and (n − 1) (296 n + 132) bytes. It needs room for one more vector, and
for another slice where means are rounded. What rounding loses may be sent later (feedback.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from operator import mul
from statistics import median

from torch import Tensor

from peer import clock
from peer.config.schema import ExchangeConfig
from peer.exchange.group.feedback import keep, round_mean, slices
from peer.exchange.group.flow_control import turns
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.rounding import Rounded, Rounding, borders, encoded, receive
from peer.exchange.group.shown import Shown, contradiction, digest_of, empty_table, read_table, table
from peer.exchange.group.sketch import NOTHING_LOST, Sketch, Sketches, factors
from peer.exchange.group.streams import Carried, GroupStreams
from peer.p2p.deadline import together
from peer.p2p.payload import fp32_parts, receive_fp32
from peer.rounds.contribution import Contribution, Vector, copy_own, host_vector, norm, parts


@dataclass(eq=False, kw_only=True)
class AllReduceExchange(GroupProtocol[Contribution]):
    """The mean of all members' contributions; what is unusually long is clipped.

    ``kept``: this member's part of the error feedback, with a codec that has it. Flat fp32 on the host.
    """

    kept: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._work: _Reduction | None = None

    def _take_own(self, contribution: Contribution) -> None:
        self._work = None
        copy_own(contribution, self._buffer)

    def _carries(self, members: int) -> Carried:
        return Carried(3, 2 * Rounding(self.settings.codec).size(self.numel // members))

    async def _combine(self, own: Contribution, streams: GroupStreams) -> None:
        self._work = work = _Reduction(own, self._buffer, streams, self.settings, self.kept)
        await together([work.reduce(), streams.with_all(work.exchange)])

    def _used(self) -> None:
        assert self._work is not None
        self._work.keep()
        self._work = None


class _Reduction:
    """One round of one member. ``result``: takes the mean."""

    def __init__(
        self, own: Contribution, result: Tensor, streams: GroupStreams, settings: ExchangeConfig, kept: Tensor | None
    ) -> None:
        self._streams = streams
        self._stall, self._ratio = settings.stall, settings.max_norm_ratio
        count, self._me = len(streams.assembly.seats), streams.assembly.me
        self._rounding = Rounding(settings.codec)
        self._own = slices(own, kept, count, self._me)
        self._means, self._kept = (_cut(vector, count) for vector in (result, kept))
        self._mean = self._means[self._me]
        self._lost: Tensor | None = None  # by rounding our mean
        self._rounded: list[bytes] = []  # our mean
        self._order = turns(self._rounding.size(self._mean.numel()))
        self._given = {place: host_vector(self._mean.numel()) for place in range(count)}  # contributions to our slice
        self._arrived, self._reduced = asyncio.Semaphore(0), asyncio.Event()
        self._gathered, self._sketched = asyncio.Semaphore(0), asyncio.Event()
        self._table = empty_table(count)
        self._sketches: list[Sketch] = []  # of the means, by place
        self._tables: dict[int, Shown] = {}
        self._told, self._checked = asyncio.Semaphore(0), asyncio.Event()

    async def reduce(self) -> None:
        """Average our slice when all have sent theirs; show what was averaged when all means are there; check all means
        when all have shown theirs.
        """
        await clock.in_thread(copy_own, self._own[self._me], self._given[self._me])  # all streams stood still else
        for _ in range(len(self._given) - 1):
            await self._arrived.acquire()
        norms = await clock.in_thread(lambda: [norm(self._given[place]) for place in sorted(self._given)])
        self._judge(norms)
        await clock.in_thread(self._average, factors(norms), norms)
        self._reduced.set()
        for _ in range(len(self._given) - 1):
            await self._gathered.acquire()
        await clock.in_thread(self._sketch)
        for place, mean in enumerate(self._sketches):
            self._streams.require(math.isfinite(mean[0]), place, "the mean from {} is not finite")
        self._sketched.set()
        for _ in range(len(self._given) - 1):
            await self._told.acquire()
        most_lost = self._rounding.most_lost
        self._streams.require_agreement(contradiction(self._tables, self._me, self._sketches, most_lost))
        self._checked.set()

    async def exchange(self, place: int) -> None:
        """With the member at ``place``: contributions, means and tables, both ways."""
        size, rounding = self._rounding.size, self._rounding
        payloads = size(self._mean.numel()) + size(self._means[place].numel()) + self._table.nbytes
        stream = self._streams.flow(place, payloads)

        async def outward() -> None:
            await stream.send(encoded(rounding, self._own[place]), self._order)
            await stream.send(self._send_mean(), self._order, ready=self._reduced)
            await stream.send(fp32_parts(Vector(self._table)), self._order, ready=self._sketched)

        async def inward() -> None:
            shown = empty_table(len(self._given))
            for room, next_step in (self._given[place], self._arrived), (self._means[place], self._gathered):
                await receive(stream, rounding, room, self._stall)
                stream.received()
                next_step.release()
            await receive_fp32(stream, shown, self._stall)
            stream.received()
            self._tables[place] = read_table(shown, len(self._given))
            self._told.release()
            # Before the next wait: while this peer waits for a third member's table it reads no acknowledgements from
            # this stream, and the member's turn to send would never end.
            await stream.await_acknowledgements(3)
            await self._checked.wait()

        await together([outward(), inward(), stream.acknowledge(3)])

    def _judge(self, norms: list[float]) -> None:
        """No norm may exceed ``max_norm_ratio`` times the median of all; two members cannot tell."""
        for place, length in enumerate(norms):
            self._streams.require(math.isfinite(length), place, "the contribution of {} is not finite")
        middle = median(norms)
        for place, length in enumerate(norms):
            sane = len(norms) < 3 or length <= self._ratio * middle or middle == 0
            detail = f"the norm of {{}}, {length:.4g}, is far above the median {middle:.4g}"
            self._streams.require(sane or place == self._me, place, detail)

    def _average(self, weights: list[float], norms: list[float]) -> None:
        for start, stop in parts(self._mean.numel()):
            total = self._mean[start:stop].zero_()
            for place, weight in enumerate(weights):
                total.add_(self._given[place][start:stop], alpha=weight)
            total.mul_(1 / len(weights))
        if not self._rounding.exact:
            kept, counted = self._kept[self._me] if self._kept else None, [*map(mul, weights, norms)]
            self._rounded, self._lost = round_mean(self._mean, kept, counted, self._rounding)

    async def _send_mean(self) -> AsyncIterator[bytes]:
        if self._rounding.exact:
            async for data in fp32_parts(Vector(self._mean)):
                yield data
        for data in self._rounded:
            yield data

    def keep(self) -> None:
        """The group uses the result: what rounding has lost is sent later, with a codec that has error feedback."""
        for place, kept in enumerate(self._kept):
            if place != self._me:
                keep(self._own[place], self._rounding, kept)
            elif self._lost is not None:
                kept.add_(self._lost)

    def _sketch(self) -> None:
        digests = [digest_of(mean) for mean in self._means]
        seed = b"".join(digests).hex()
        sent, given, lost = list[Sketch](), list[Sketch](), NOTHING_LOST
        for place, (own, mean) in enumerate(zip(self._own, self._means, strict=True)):
            sketches = Sketches(f"{seed} {place}", own.numel)
            sent.append(sketches.of(own if place == self._me else Rounded(own, self._rounding)))
            self._sketches.append(sketches.of(Vector(mean)))
            if place == self._me:
                given = [sketches.of(Vector(self._given[other])) for other in sorted(self._given)]
                lost = NOTHING_LOST if self._lost is None else sketches.of(Vector(self._lost))
        self._table.copy_(table(digests, given, lost, sent))
        self._tables[self._me] = read_table(self._table, len(self._given))


def _cut(vector: Tensor | None, count: int) -> list[Tensor]:
    """The slice of each of ``count`` members."""
    return [] if vector is None else [vector[start:stop] for start, stop in borders(vector.numel(), count)]
