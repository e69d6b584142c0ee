"""Peers of one process that share the device and swap by the real protocol, over sockets: no p2p daemon is needed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from peer.commands.simulate.replica import Replica
from peer.config.schema import Config
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.mailbox import OpenPart, SwapMailbox
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.outer.noloco import NoLoCo, PartOpening
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Link
from peer.training.checkpoint import Saved
from tests.gpu.site import Site

PATIENCE = 120.0  # seconds for a swap
LOOK = 0.02  # seconds


class Sharer:
    """A peer, and the simulator's replica of the same state (:meth:`reflect`), unless it is not ``mirrored``."""

    def __init__(
        self, site: Site, config: Config, name: str, stream: int, network: LoopThread, *, mirrored: bool = True
    ) -> None:
        run = config.run
        self.name, self.state = name, site.replica(config, stream)
        numel, overlap = self.state.outer.slow.numel, run.exchange.overlap
        exchange = OverlappedPairExchange if overlap else PairExchange
        codec, settings = codec_named(run.exchange.codec, numel), run.exchange
        self.exchange = exchange(network=network, numel=numel, codec=codec, settings=settings, guard=Guard())
        if not mirrored:
            return
        mirror = site.replica(config, stream)
        codec = codec_named(run.exchange.codec, numel)
        self.mirror = Replica(name, mirror, 1.0, run.steps, run.inner_steps, codec, Guard())

    @property
    def method(self) -> NoLoCo:
        assert isinstance(self.state.outer, NoLoCo)
        return self.state.outer

    def train(self, steps: int) -> float:
        """The mean loss."""
        return self.state.inner.run(self.state.stream.take(steps)).loss

    def reflect(self) -> None:
        """Give the mirror this peer's state, bit by bit, so that only the swap can make a difference."""
        tensors = {
            name: {key: it.detach().cpu().clone() for key, it in held.items()} for name, held in self.state.tensors()
        }
        self.mirror.state.restore(Saved(Path(), self.state.scalars(), tensors))

    def group(self, partner: Sharer, stream: Stream) -> Group:
        return Group(self.state.counters.round, (Link(partner.name, partner.name, stream),))


def blocking(peer: Sharer, group: Group) -> Averaged:
    assert isinstance(peer.exchange, PairExchange)
    averaged = peer.exchange.average(peer.method.contribution(), group)
    peer.method.apply(averaged.mean)
    return averaged


def overlapped(peer: Sharer, group: Group) -> Averaged:
    """All parts are opened between two inner steps, and corrected after the second: the simulator's schedule."""
    assert isinstance(peer.exchange, OverlappedPairExchange)
    mailbox = peer.exchange.start(lambda: replace(group, step_seconds=1.0))
    _wait(mailbox, lambda: bool(mailbox.parts_to_open(idle=True)))
    open_parts(PartOpening(peer.method, mailbox.parts), mailbox, mailbox.parts_left(), wait=True)
    peer.train(1)
    _wait(mailbox, lambda: amend_parts(peer.method, mailbox) < 0)  # until the swap ends
    result = mailbox.result()
    assert result is not None, "the swap has not ended in time"
    amend_parts(peer.method, mailbox)
    return result


def open_parts(opening: PartOpening, mailbox: SwapMailbox, wanted: range, *, wait: bool) -> None:
    for index, own, change in opening.open(wanted, 0, wait=wait):
        mailbox.put(index, OpenPart(own, change))


def amend_parts(method: NoLoCo, mailbox: SwapMailbox) -> int:
    """The number of corrections that had come."""
    arrived = mailbox.take_corrections()
    for index, correction in arrived:
        method.amend(mailbox.parts[index][0], correction)
    return len(arrived)


async def stream_pair() -> tuple[Stream, Stream]:
    """Initiator and responder, over a pair of sockets."""
    left, right = [await asyncio.open_connection(sock=it) for it in socket.socketpair()]
    return Stream(*left, remote="B", initiator=True), Stream(*right, remote="A", initiator=False)


def swap_all(network: LoopThread, pairs: list[tuple[Sharer, Sharer]], swap: Callable[..., Averaged]) -> list[Averaged]:
    """All pairs at once, each peer in a thread of its own as on a shared card."""
    calls = []
    for one, two in pairs:
        streams = network.call(stream_pair(), 5)
        calls += [(one, one.group(two, streams[0])), (two, two.group(one, streams[1]))]
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(swap, *call) for call in calls]]


def _wait(mailbox: SwapMailbox, ready: Callable[[], bool]) -> None:
    """Until ``ready``, or the end of the swap."""
    for _ in range(round(PATIENCE / LOOK)):
        if ready() or mailbox.result() is not None:
            return
        mailbox.wait(LOOK)
