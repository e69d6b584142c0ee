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
from peer.exchange.average import Exchange, Verdict, blend
from peer.exchange.codec import size
from peer.exchange.guard import Guard, Judgement
from peer.exchange.modulo import codec_named
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.wire import Header
from peer.p2p.bulk import offer
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.contribution import Averaged, Contribution, Vector, parts, scratch
from peer.rounds.types import Group, Link
from tests.unit.virtual import stream_pair, virtual_time

FAST = ExchangeConfig(stall=1.0)  # so that a fault is noticed within a test
PHASE = 1.0  # seconds: a swap may take four of these and is judged after each
T = TypeVar("T")


def header(numel: int, round: int = 0, codec: CodecName = "none", **told: float) -> Header:
    return Header(codec=codec, payload_bytes=size(codec, numel), round=round, **told)


def pair_exchange(network: LoopThread, numel: int, codec: CodecName = "none") -> PairExchange:
    return PairExchange(network, numel, codec_named(codec, numel), FAST, Guard())


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

    exchanges: tuple[Exchange[Contribution], Exchange[Contribution]]
    groups: Callable[[], tuple[Group, Group]]

    def average(self, one: Tensor, two: Tensor) -> tuple[Averaged, Averaged]:
        """Both at once."""
        first, second = at_once(
            partial(exchange.average, Vector(vector), group)
            for exchange, vector, group in zip(self.exchanges, (one, two), self.groups(), strict=True)
        )
        return first, second


def at_once(works: Iterable[Callable[[], T]], seconds: float = 30.0) -> list[T]:
    """The results of all, each from a thread of its own."""
    futures = [clock.worker(f"side {number}").submit(work) for number, work in enumerate(works)]
    return [clock.result(future, seconds) for future in futures]


@contextlib.contextmanager
def sockets(numel: int, folder: Path) -> Iterator[Pair]:
    thread = LoopThread()

    def groups() -> tuple[Group, Group]:
        one, two = thread.call(stream_pair(), 5)
        return Group(0, (Link("B", "b", one),)), Group(0, (Link("A", "a", two),))

    try:
        yield Pair((pair_exchange(thread, numel), pair_exchange(thread, numel)), groups)
    finally:
        thread.close()


@contextlib.contextmanager
def memory(numel: int, folder: Path) -> Iterator[Pair]:
    with virtual_time(), sockets(numel, folder) as pair:
        yield pair


@contextlib.contextmanager
def direct(numel: int, folder: Path) -> Iterator[Pair]:
    """As :func:`network`, with direct connections for the parts of whatever size."""
    least, offer.LEAST_BULK = offer.LEAST_BULK, 0
    try:
        with network(numel, folder, bulk_port="auto") as pair:
            yield pair
    finally:
        offer.LEAST_BULK = least


@contextlib.contextmanager
def network(numel: int, folder: Path, bulk_port: Literal["auto", "off"] = "off") -> Iterator[Pair]:
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
            other = arrived.get(timeout=10)
            return Group(0, (Link(two.peer_id, "b", stream),)), Group(0, (Link(one.peer_id, "a", other),))

        yield Pair((pair_exchange(one, numel), pair_exchange(two, numel)), groups)


TRANSPORTS = {"memory": memory, "sockets": sockets, "network": network, "direct": direct}
