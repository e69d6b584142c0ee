"""The average of sparse contributions: they are small, so every member sends its own to every other one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from peer import clock
from peer.exchange.average import mean_of_senders
from peer.exchange.codec import COEFFICIENT_BYTES, pack, unpack
from peer.exchange.group.flow_control import turns
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.sketch import factors
from peer.exchange.group.streams import Carried, GroupStreams
from peer.p2p.deadline import together
from peer.p2p.payload import fp32_parts, receive_fp32
from peer.rounds.contribution import SparseContribution, Vector


class AllGatherExchange(GroupProtocol[SparseContribution]):
    """Each coefficient's mean over the members that sent it, zero elsewhere. What is unusually long is clipped.

    ``numel``: how many coefficients a contribution has.
    """

    def _take_own(self, contribution: SparseContribution) -> None:
        mean_of_senders([contribution], self._buffer)

    def _carries(self, members: int) -> Carried:
        return Carried(1, COEFFICIENT_BYTES * self._numel)

    async def _combine(self, own: SparseContribution, streams: GroupStreams) -> None:
        packed, stall = pack(own), self._settings.stall
        order = turns(packed.nbytes)

        async def swap(place: int) -> SparseContribution:
            stream = streams.flow(place, packed.nbytes)

            async def inward() -> SparseContribution:
                room = torch.empty_like(packed)
                await receive_fp32(stream, room, stall)
                stream.received()
                theirs = unpack(room, own)
                fits = int(theirs.positions.max()) < own.numel
                streams.require(fits, place, "{} sent a coefficient that the model does not have")
                finite = bool(torch.isfinite(theirs.values).all())
                streams.require(finite, place, "the contribution of {} is not finite")
                await stream.settle(1)
                return theirs

            theirs: SparseContribution
            theirs, *_ = await together(
                [inward(), stream.send(fp32_parts(Vector(packed)), order), stream.acknowledge(1)]
            )
            return theirs

        by_place = {streams.assembly.me: own, **await streams.with_all(swap)}
        await clock.in_thread(self._average, [by_place[place] for place in sorted(by_place)])

    def _average(self, group: Sequence[SparseContribution]) -> None:
        mean_of_senders(
            [_scaled(*each) for each in zip(group, factors([*map(_norm, group)]), strict=True)], self._buffer
        )


def _norm(contribution: SparseContribution) -> float:
    """Rounded: all members must find the same one, on whatever machine."""
    return float(f"{float(torch.linalg.vector_norm(contribution.values, dtype=torch.float64)):.6g}")


def _scaled(contribution: SparseContribution, factor: float) -> SparseContribution:
    return replace(contribution, values=contribution.values * factor)
