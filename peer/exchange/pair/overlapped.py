"""The overlapped swap: it runs during the inner steps, and each part is verified and used by itself.

Each side sends a part when the training thread has opened it. A part that arrives is judged together with all before
it; then its correction goes to the training thread. The corrections of an unknown partner are held until the first
eighth of all elements has come.

A swap that breaks off leaves some parts with the outer step of a group of two and the others with that of a group of
one. Each is right by itself, so nothing has to be taken back.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from peer import clock
from peer.exchange.codec import size
from peer.exchange.pair.mailbox import OpeningPace, OpenPart, SwapMailbox
from peer.exchange.pair.protocol import PairProtocol, Transfer
from peer.exchange.pair.wire import Unusable
from peer.p2p.payload import receive_parts
from peer.rounds.contribution import Averaged, host_vector
from peer.rounds.types import Group, Outcome

NOTHING = host_vector(0)


class OverlappedPairExchange(PairProtocol):
    """Starts swaps, one at a time; each runs on a helper thread."""

    def __post_init__(self) -> None:
        self._helper = clock.worker("swap")
        self._opening_pace = OpeningPace(most=0)  # of the last swap; before the first one, one of no parts

    def start(self, meet: Callable[[], Group]) -> SwapMailbox:
        """``meet`` finds the partner, on the helper thread."""
        learn = self.codec.learn if self.codec.begin() else None
        mailbox = SwapMailbox(self.numel, self.network.loop, learn, self._opening_pace.landing)
        self._opening_pace = mailbox.opening_pace
        self._helper.submit(contextvars.copy_context().run, self._run, mailbox, meet)
        return mailbox

    def close(self) -> None:
        self._helper.shutdown(wait=False, cancel_futures=True)

    def _run(self, mailbox: SwapMailbox, meet: Callable[[], Group]) -> None:
        try:
            group = meet()
            if not group.links:
                self.codec.end_round(False)
                mailbox.finish(Averaged(NOTHING, Outcome.ALONE))
                return
            encode, receive = partial(self._encode, mailbox), partial(self._receive, mailbox)
            averaged = self._swap(group, encode, receive, NOTHING)
            if averaged.outcome is not Outcome.MERGED and mailbox.used_parts:
                parts = f"after {mailbox.used_parts} of {len(mailbox.parts)} parts"
                averaged = replace(averaged, detail=f"{averaged.detail} ({parts})")
            if averaged.outcome is Outcome.TIMEOUT and mailbox.cancelled:
                averaged = replace(averaged, culprits=())
            mailbox.finish(averaged)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            mailbox.finish(error)

    async def _encode(self, mailbox: SwapMailbox, transfer: Transfer) -> AsyncIterator[bytes]:
        number = 0
        while number < len(mailbox.parts):
            opened = await mailbox.opened_from(number, transfer.stall)
            starts = [start for start, _ in mailbox.parts[number : number + len(opened)]]
            for data in await clock.in_thread(self._coded, starts, opened):
                yield data
                mailbox.count_sent()
            number += len(opened)

    def _coded(self, starts: list[int], opened: list[OpenPart]) -> list[bytes]:
        """In one call for small parts, each of which takes less than to change threads."""
        return [self.codec.encode_changed(at, it.own, it.change) for at, it in zip(starts, opened, strict=True)]

    async def _receive(self, mailbox: SwapMailbox, transfer: Transfer) -> bytes:
        """Returns the digest of the first part that this peer has changed: others may be the same in all rounds."""
        mailbox.start(transfer.stream.close)
        first = changed = b""

        def correction(start: int, data: memoryview, digest: bytes, opened: OpenPart) -> Tensor:
            """The mean less our own contribution; raises :class:`Unusable`."""
            nonlocal changed
            theirs, judgement = torch.empty_like(opened.own), transfer.judgement
            unresolved = self.codec.decode(transfer.codec, start, data, opened.own, theirs)
            share = judgement.add(start, opened.own, opened.change, theirs, unresolved)
            changed = changed or (digest if judgement.change else b"")
            objection = judgement.objection(changed)
            if objection is not None:
                self.guard.learn(judgement)
                raise Unusable(objection)
            return theirs.sub_(opened.own).mul_(share)

        rooms = (memoryview(bytearray(size(transfer.codec, stop - start))) for start, stop in mailbox.parts)
        async for number, data, digest in receive_parts(transfer.stream, rooms, transfer.stall):
            first = first or digest
            opened = await mailbox.opened(number, transfer.stall)
            corrected = await clock.in_thread(correction, mailbox.parts[number][0], data, digest, opened)
            mailbox.add_correction(number, corrected, usable=transfer.judgement.usable)
        return changed or first  # after the last inner step nothing changes
