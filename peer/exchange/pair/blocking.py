"""The swap: one tensor each way with one partner, over a stream that the rendezvous has opened.

    initiator                                     responder
       │ header ───────────────────────────────▶ ◀─── header │   both: equal run, config, layout, size?
       │ 1 MiB parts, digest ──────────────────▶ ◀─── parts  │   at the same time, each into its one buffer
       │                  both: digest right? and the guard's questions (guard.py)
       │ acknowledgement ──────────────────────▶             │
       │             ◀──────────────────────── acknowledgement│   only after it has read the other one
       │ close ────────────────────────────────▶             │   so nothing can be cut off

A side merges when its own verdict and its partner's are both "merged". The only way to a half merge is that
the responder's acknowledgement gets lost: then it has merged and the initiator has not. NoLoCo lives with it;
the initiator counts a timeout and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import torch

from peer.config.schema import ExchangeConfig
from peer.exchange.average import Verdict, copy_own
from peer.exchange.codec import Codec, prepare
from peer.exchange.guard import Guard, Trial
from peer.exchange.pair.coded import receive_coded, send_coded
from peer.exchange.pair.deadline import Deadline
from peer.exchange.pair.handshake import Greeting, Tally, both_ways, guarded, part, share
from peer.exchange.pair.wire import Identity
from peer.p2p.stream import Stream
from peer.rounds.contribution import Averaged, Contribution, Sparse
from peer.rounds.types import Group, Outcome, Reason

T = TypeVar("T")
GRACE = 5.0  # seconds on top of a swap's deadline before the calling thread gives up on the network thread


class Network(Protocol):
    """What a swap needs of the node: its loop, and to run a coroutine on it with a deadline."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T: ...


class PairExchange:
    """:class:`peer.exchange.average.GroupAverage` for groups of two."""

    def __init__(
        self, network: Network, identity: Identity, codec: Codec, settings: ExchangeConfig, guard: Guard
    ) -> None:
        self._network = network
        self._codec = codec
        self._identity = identity
        self._settings = settings
        self._deadline = Deadline(settings.timeout)
        self._guard = guard
        self._buffer = torch.empty(identity.numel, dtype=torch.float32)

    def average(self, contribution: Contribution | Sparse, group: Group) -> Averaged:
        assert not isinstance(contribution, Sparse), "pairs swap whole vectors"
        if not group.links:
            self._codec.settle(False)
            copy_own(contribution, self._buffer)
            return Averaged(self._buffer, Outcome.ALONE)
        (link,) = group.links
        stream = link.stream
        assert stream is not None
        prepare(self._codec, contribution)
        trial = self._guard.trial(link.peer_id, contribution.numel)
        limit, tally = self._deadline.seconds, Tally(stream, trial)
        greeting = Greeting(self._identity, group.round, self._codec, group.tokens)
        swap = self._swap(contribution, stream, greeting, trial)
        verdict = self._network.call(guarded(swap, stream, limit), limit + GRACE)
        averaged = tally.averaged(verdict, link, self._buffer)
        self._codec.settle(verdict.outcome is Outcome.MERGED)
        if verdict.outcome is Outcome.MERGED:
            self._deadline.observe(averaged.seconds)
        else:
            copy_own(contribution, self._buffer)
        return averaged

    async def _swap(self, own: Contribution, stream: Stream, greeting: Greeting, trial: Trial) -> Verdict:
        """When merged, the buffer holds the mean."""
        stall = self._settings.stall
        header = await greeting.exchange(stream, stall)
        trial.ahead = header.round - greeting.round
        theirs = share(header.tokens, greeting.tokens)
        digest: bytes | None = None

        async def receive() -> None:
            nonlocal digest
            digest = await receive_coded(stream, own, self._codec, header, self._buffer, trial, theirs, stall)

        await both_ways(send_coded(stream, own, self._codec, stall), receive())
        if digest is None:
            detail = "the payload does not match its digest"
            verdict = Verdict(Outcome.CORRUPT, detail=detail, reason=Reason.DIGEST)
        else:
            verdict = trial.verdict(digest)
        return await part(stream, verdict, stall)
