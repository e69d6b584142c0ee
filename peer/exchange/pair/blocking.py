"""The blocking swap: the training thread waits for it, and nothing is used before all of it is verified.

Each side sends its parts and receives the partner's at the same time, into one buffer. A thread encodes a few parts, or
decodes, judges and averages them, while others are in transit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from itertools import cycle, starmap

import xxhash

from peer import clock
from peer.exchange.codec import prepare, size
from peer.exchange.pair.protocol import LONGEST_STALL_SHARE, PairProtocol, Transfer
from peer.p2p.payload import receive_parts
from peer.rounds.contribution import PART, Averaged, Contribution, blend, copy_own, host_vector, parts, scratch
from peer.rounds.transfer_rule import copy_limit
from peer.rounds.types import Group, Outcome

TOGETHER = 4  # parts that a thread encodes or decodes in one call: to change threads takes a third as long as a part


class PairExchange(PairProtocol):
    """:class:`peer.rounds.contribution.Exchange` for groups of two."""

    def __post_init__(self) -> None:
        self._buffer = host_vector(self.numel)

    def average(self, contribution: Contribution, group: Group) -> Averaged:
        if not group.links:
            self.codec.end_round(False)
            copy_own(contribution, self._buffer)
            return Averaged(self._buffer, Outcome.ALONE)
        prepare(self.codec, contribution)
        encode, receive = partial(self._encode, contribution), partial(self._receive, contribution)
        averaged = self._swap(group, encode, receive, self._buffer)
        if averaged.outcome is not Outcome.MERGED:
            copy_own(contribution, self._buffer)
        return averaged

    def _header_limit(self, group: Group) -> float:
        """A partner whose codec knows nothing of others yet reads its whole contribution before (:func:`prepare`)."""
        stall = self.settings.stall
        if not self.codec.learns:
            return stall
        return min(copy_limit(4 * self.numel, stall), LONGEST_STALL_SHARE * self._time_limit(group, stall))

    async def _encode(self, own: Contribution, transfer: Transfer) -> AsyncIterator[bytes]:
        room, room_of_change = scratch(own.numel), scratch(own.numel)

        def encode(start: int, stop: int) -> bytes:
            part, change = room[: stop - start], room_of_change[: stop - start]
            own.read_both(start, part, change)
            return self.codec.encode_changed(start, part, change)

        borders = parts(own.numel)
        for first in range(0, len(borders), TOGETHER):
            for data in await clock.in_thread(list, starmap(encode, borders[first : first + TOGETHER])):
                yield data

    async def _receive(self, own: Contribution, transfer: Transfer) -> bytes:
        """The buffer ← the mean of ``own`` and what the partner sends. Returns the digest of all parts' digests."""
        borders, fingerprint = parts(own.numel), xxhash.xxh3_128()
        room, room_of_change = scratch(own.numel), scratch(own.numel)

        def decode(start: int, stop: int, data: memoryview) -> None:
            part, change, mean = room[: stop - start], room_of_change[: stop - start], self._buffer[start:stop]
            own.read_both(start, part, change)
            unresolved = self.codec.decode(transfer.codec, start, data, part, mean)
            blend(part, mean, transfer.judgement.add(start, part, change, mean, unresolved))

        longest = size(transfer.codec, min(PART, own.numel))
        free = cycle([memoryview(bytearray(longest)) for _ in range(2 * TOGETHER)])  # half are decoded, half are filled
        rooms = (next(free)[: size(transfer.codec, stop - start)] for start, stop in borders)
        came: list[tuple[int, int, memoryview]] = []
        decoding: asyncio.Future[list[None]] | None = None
        try:
            async for number, data, digest in receive_parts(transfer.stream, rooms, transfer.stall):
                fingerprint.update(digest)
                came.append((*borders[number], data))
                if len(came) == TOGETHER or number == len(borders) - 1:
                    if decoding is not None:
                        await decoding
                    decoding = asyncio.ensure_future(clock.in_thread(list, starmap(decode, came)))
                    came = []
        finally:
            if decoding is not None:
                await decoding  # also after a failure: nothing may write to the buffer after this
        return fingerprint.digest()
