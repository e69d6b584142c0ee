"""The swap beside the inner steps: as pair.py, but part by part, each verified and used by itself.

    both: header ─▶ ◀─ header       equal run, config, layout, size? and how long an inner step takes here
    both, at the same time: part, digest; part, digest; ...     each sent when the training thread has opened it
    each part on arrival: digest right? the guard's questions, by the parts so far? then what it adds to the mean lands,
        of a partner that is not known yet together with the first eighth of all parts
    initiator: acknowledgement ─▶    responder, after it has read that one: ◀─ acknowledgement

A swap that breaks off in the middle leaves some parts with the outer step of a group of two and the others with that of
a group of one. Each is right by itself, so nothing has to be taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from peer.config.schema import CodecName, ExchangeConfig
from peer.exchange.average import Verdict
from peer.exchange.codec import Codec, size
from peer.exchange.guard import Guard, Trial
from peer.exchange.pair.blocking import GRACE, Network
from peer.exchange.pair.deadline import Deadline
from peer.exchange.pair.flight import Flight, Opened
from peer.exchange.pair.handshake import Greeting, Tally, Unusable, both_ways, guarded, part, share
from peer.exchange.pair.wire import Identity
from peer.p2p.payload import DIGEST_BYTES
from peer.p2p.stream import Stream
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Outcome, Reason

PATIENCE = 6.0  # inner steps of both without a part: a partner that trains only opens parts between its steps
NOTHING = torch.empty(0)


@dataclass
class Swap:
    """One swap's fixed facts."""

    flight: Flight
    stream: Stream
    trial: Trial
    learns: bool  # the codec wants to know what was trained
    patience: float = 0.0  # seconds for the next part
    theirs: CodecName = "none"
    share: float = 0.5  # the partner's, in the mean
    digest: bytes = b""  # of the first part


class RollingExchange:
    """Starts swaps that end by themselves; one at a time."""

    def __init__(
        self, network: Network, identity: Identity, codec: Codec, settings: ExchangeConfig, guard: Guard
    ) -> None:
        self._network, self._identity, self._codec, self._settings = network, identity, codec, settings
        self._deadline = Deadline(settings.timeout)
        self._guard = guard
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="swap")

    def start(self, pace: float, meet: Callable[[], Group]) -> Flight:
        """``meet`` finds the partner, on a helper thread; ``pace``: seconds of an inner step."""
        flight = Flight(self._identity.numel, self._network.loop)
        self._helper.submit(self._fly, flight, pace, meet, self._codec.begin())
        return flight

    def close(self) -> None:
        """No further swaps."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def _fly(self, flight: Flight, pace: float, meet: Callable[[], Group], learns: bool) -> None:
        try:
            group = meet()
            if group.links:
                flight.end(self._with_partner(flight, group, pace, learns))
            else:
                self._codec.settle(False)
                flight.end(Averaged(NOTHING, Outcome.ALONE))
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            flight.end(error)

    def _with_partner(self, flight: Flight, group: Group, pace: float, learns: bool) -> Averaged:
        (link,) = group.links
        stream = link.stream
        assert stream is not None
        trial = self._guard.trial(link.peer_id, self._identity.numel)
        limit, tally = self._deadline.seconds, Tally(stream, trial)
        swap = Swap(flight, stream, trial, learns)
        work = self._swap(swap, Greeting(self._identity, group.round, self._codec, group.tokens, pace))
        verdict = self._network.call(guarded(work, stream, limit), limit + GRACE)
        merged = verdict.outcome is Outcome.MERGED
        self._codec.settle(merged)
        if not merged and flight.used_parts:
            detail = f"{verdict.detail} (after {flight.used_parts} of {len(flight.parts)} parts)"
            verdict = replace(verdict, detail=detail)
        averaged = tally.averaged(verdict, link, NOTHING)
        if merged:
            self._deadline.observe(averaged.seconds)
        return averaged

    async def _swap(self, swap: Swap, greeting: Greeting) -> Verdict:
        stall = self._settings.stall
        header = await greeting.exchange(swap.stream, stall)
        swap.share = share(header.tokens, greeting.tokens)
        swap.theirs, swap.patience = header.codec, max(stall, PATIENCE * (greeting.pace + header.pace))
        swap.trial.ahead = header.round - greeting.round
        swap.flight.begin(swap.stream.close)
        await both_ways(self._send(swap), self._receive(swap))
        return await part(swap.stream, swap.trial.verdict(swap.digest), swap.patience)

    async def _send(self, swap: Swap) -> None:
        def encode(index: int, own: Tensor, change: Tensor) -> bytes:
            start = swap.flight.parts[index][0]
            if swap.learns:
                self._codec.learn(start, change)
            data = self._codec.encode(start, own)
            return data + xxhash.xxh3_128_digest(data)

        for index in range(len(swap.flight.parts)):
            opened = await swap.flight.own(index, swap.patience)
            await swap.stream.write(await asyncio.to_thread(encode, index, opened.own, opened.change), swap.patience)
            swap.flight.sent()

    async def _receive(self, swap: Swap) -> None:
        digest = bytearray(DIGEST_BYTES)
        for index, (start, stop) in enumerate(swap.flight.parts):
            data = bytearray(size(swap.theirs, stop - start))
            await swap.stream.read_into(memoryview(data), swap.patience)
            await swap.stream.read_into(memoryview(digest), swap.patience)
            if xxhash.xxh3_128_digest(data) != digest:
                raise Unusable(Outcome.CORRUPT, f"part {index} does not match its digest", Reason.DIGEST)
            swap.digest = swap.digest or bytes(digest)
            opened = await swap.flight.own(index, swap.patience)
            correction = await asyncio.to_thread(self._correction, swap, start, data, opened)
            swap.flight.land(index, correction, usable=swap.trial.usable)

    def _correction(self, swap: Swap, start: int, data: bytearray, opened: Opened) -> Tensor:
        """The mean, less our own; raises :class:`Unusable`."""
        theirs = torch.empty_like(opened.own)
        self._codec.decode(swap.theirs, start, data, opened.own, theirs)
        swap.trial.add(opened.own, opened.change, theirs)
        objection = swap.trial.objection(swap.digest)
        if objection:
            self._guard.learn(swap.trial)
            raise Unusable(Outcome.POISONED, objection[1], objection[0])
        return theirs.sub_(opened.own).mul_(swap.share)
