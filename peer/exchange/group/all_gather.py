"""The average of sparse contributions: they are small, so every member sends its own to every other one.

Then it sends digests of all that it has: who sent different contributions to different members is found (shown.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from peer import clock
from peer.exchange.codec import COEFFICIENT_BYTES, pack, unpack
from peer.exchange.group.flow_control import turns
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.shown import HELD_WORDS, digest_of, digest_table, held_apart
from peer.exchange.group.sketch import factors
from peer.exchange.group.streams import Carried, GroupStreams
from peer.p2p.deadline import together
from peer.p2p.payload import fp32_parts, receive_fp32
from peer.rounds.contribution import SparseContribution, Vector, host_vector, mean_of_senders


@dataclass(eq=False, kw_only=True)
class AllGatherExchange(GroupProtocol[SparseContribution]):
    """Each coefficient's mean over the members that sent it, zero elsewhere. What is unusually long is clipped.

    ``numel``: how many coefficients a contribution has; ``result``: the mean.
    """

    result: int

    def __post_init__(self) -> None:
        self._buffer = host_vector(self.result)

    def _take_own(self, contribution: SparseContribution) -> None:
        mean_of_senders([contribution], self._buffer)

    def _carries(self, members: int) -> Carried:
        return Carried(2, COEFFICIENT_BYTES * self.numel + 4 * HELD_WORDS * members)

    async def _combine(self, own: SparseContribution, streams: GroupStreams) -> None:
        packed, stall, me = pack(own), self.settings.stall, streams.assembly.me
        count = len(streams.assembly.seats)
        order, table = turns(packed.nbytes), host_vector(count * HELD_WORDS)
        digests, all_here = {me: digest_of(packed)}, asyncio.Event()

        async def swap(place: int) -> SparseContribution:
            stream = streams.flow(place, packed.nbytes + table.nbytes)

            async def outward() -> None:
                await stream.send(fp32_parts(Vector(packed)), order)
                await stream.send(fp32_parts(Vector(table)), order, ready=all_here)

            async def inward() -> SparseContribution:
                room, shown = torch.empty_like(packed), torch.empty_like(table)
                await receive_fp32(stream, room, stall)
                stream.received()
                theirs = unpack(room, own)
                fits = int(theirs.positions.max()) < own.numel
                streams.require(fits, place, "{} sent a coefficient that the model does not have")
                finite = bool(torch.isfinite(theirs.values).all())
                streams.require(finite, place, "the contribution of {} is not finite")
                digests[place] = await clock.in_thread(digest_of, room)
                if len(digests) == count:
                    table.copy_(digest_table([digests[it] for it in range(count)]))
                    all_here.set()
                await receive_fp32(stream, shown, stall)
                stream.received()
                await stream.await_acknowledgements(2)
                await all_here.wait()
                streams.require_agreement(held_apart(table, shown, place, me))
                return theirs

            theirs: SparseContribution
            theirs, *_ = await together([inward(), outward(), stream.acknowledge(2)])
            return theirs

        by_place = {me: own, **await streams.with_all(swap)}
        await clock.in_thread(self._average, [by_place[place] for place in sorted(by_place)])

    def _average(self, group: Sequence[SparseContribution]) -> None:
        weights = factors([_norm(it) for it in group])
        scaled = [replace(it, values=it.values * weight) for it, weight in zip(group, weights, strict=True)]
        mean_of_senders(scaled, self._buffer)


def _norm(contribution: SparseContribution) -> float:
    """Rounded: all members must find the same one, on whatever machine."""
    return float(f"{float(torch.linalg.vector_norm(contribution.values, dtype=torch.float64)):.6g}")
