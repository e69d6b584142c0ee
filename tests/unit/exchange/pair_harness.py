"""Two peers that can average with each other, over each of the transports there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Literal, TypeVar

import xxhash
from torch import Tensor

from peer import clock
from peer.config.schema import CodecName, ExchangeConfig
from peer.exchange.codec import size
from peer.exchange.guard import Guard, Judgement
from peer.exchange.modulo import codec_named
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.wire import Header
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.contribution import Averaged, Contribution, Exchange, Vector, blend, parts, scratch
from peer.rounds.types import Group, Link, Verdict
from tests.unit.virtual import stream_pair, virtual_time

FAST = ExchangeConfig(stall=1.0)  # so that a fault is noticed within a test
WAIT = 60.0  # seconds that only a hang takes
PATIENT = ExchangeConfig(stall=WAIT)  # for tests of no stall in real time, on a machine that may be busy
PHASE = 1.0  # seconds: a swap may take four of these and is judged after each
T = TypeVar("T")


def header(numel: int, round: int = 0, codec: CodecName = "none", **told: float) -> Header:
    return Header(codec=codec, payload_bytes=size(codec, numel), round=round, **told)


def pair_exchange(
    network: LoopThread, numel: int, codec: CodecName = "none", settings: ExchangeConfig = FAST
) -> PairExchange:
    return PairExchange(network=network, numel=numel, codec=codec_named(codec, numel), settings=settings, guard=Guard())


def judge(own: Contribution, theirs: Tensor, judgement: Judgement) -> Verdict:
    """The verdict on ``theirs``, flat fp32 on the host, all at once; ``theirs`` ← the mean."""
    digest = xxhash.xxh3_128()
    room, room_of_change = scratch(own.numel), scratch(own.numel)
    for start, stop in parts(own.numel):
        part, change, mean = room[: stop - start], room_of_change[: stop - start], theirs[start:stop]
        own.read_both(start, part, change)
        digest.update(mean.numpy().data)
        blend(part, mean, judgement.add(start, part, change, mean))
    return judgement.verdict(digest.digest())


@dataclass
class Pair:
    """Two exchanges and, for each, the group with the other one in it."""

    exchanges: tuple[Exchange, Exchange]
    groups: Callable[[], tuple[Group, Group]]

    def average(self, one: Tensor, two: Tensor) -> tuple[Averaged, Averaged]:
        """Both at once."""
        works = [
            partial(exchange.average, Vector(vector), group)
            for exchange, vector, group in zip(self.exchanges, (one, two), self.groups(), strict=True)
        ]
        first, second = at_once(works, 2 * WAIT)
        return first, second


@dataclass
class Transport:
    """The networks of two peers. ``groups``: a new stream between them; ``settings``: for tests of no stall."""

    networks: tuple[LoopThread, LoopThread]
    groups: Callable[[], tuple[Group, Group]]
    settings: ExchangeConfig = PATIENT

    def pair(self, numel: int, settings: ExchangeConfig | None = None) -> Pair:
        """Two new peers."""
        one, two = (pair_exchange(it, numel, settings=settings or self.settings) for it in self.networks)
        return Pair((one, two), self.groups)


def at_once(works: Iterable[Callable[[], T]], seconds: float = 30.0) -> list[T]:
    """The results of all, each from a thread of its own."""
    futures = [clock.worker(f"side {number}").submit(work) for number, work in enumerate(works)]
    return [clock.result(future, seconds) for future in futures]


@contextlib.contextmanager
def sockets(settings: ExchangeConfig = PATIENT) -> Iterator[Transport]:
    thread = LoopThread()

    def groups() -> tuple[Group, Group]:
        one, two = thread.call(stream_pair(), 5)
        return Group(0, (Link("B", "b", one),)), Group(0, (Link("A", "a", two),))

    try:
        yield Transport((thread, thread), groups, settings)
    finally:
        thread.close()


@contextlib.contextmanager
def memory() -> Iterator[Transport]:
    with virtual_time(), sockets(FAST) as transport:
        yield transport


@contextlib.contextmanager
def network(folder: Path, bulk_port: Literal["auto", "off"]) -> Iterator[Transport]:
    """Two nodes with a p2p daemon each."""
    from peer.p2p import identity as keys
    from peer.p2p.node import Node
    from peer.p2p.settings import NodeSettings

    arrived: Queue[Stream] = Queue()

    async def handler(stream: Stream) -> None:
        arrived.put(stream)

    with contextlib.ExitStack() as stack:
        nodes: list[Node] = []
        for name in ("a", "b"):
            key = folder / f"{name}.key"
            keys.load_or_create(key)
            initial = nodes[0].addresses if nodes else ()
            node = Node(NodeSettings(key, "127.0.0.1", 0, initial_peers=initial, bulk_port=bulk_port))
            stack.callback(node.stop)
            node.start()
            nodes.append(node)
        one, two = nodes
        two.call(two.serve("noloco/test/1", handler), 5)

        def groups() -> tuple[Group, Group]:
            stream = one.call(one.open(two.peer_id, "noloco/test/1", two.addresses), 10)
            other = arrived.get(timeout=WAIT)
            return Group(0, (Link(two.peer_id, "b", stream),)), Group(0, (Link(one.peer_id, "a", other),))

        yield Transport((one, two), groups)
