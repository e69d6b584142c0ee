"""A node and a partner process for benchmarks of the swap: real p2pd, real streams, loopback only.

python -m tests.benchmarks.swap_partner ADDRESS NUMEL   (started by the benchmark: swaps zeros until it ends)
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue

import torch

from peer import logs
from peer.config.schema import ExchangeConfig
from peer.exchange.codec import Cast
from peer.exchange.pair.blocking import PairExchange
from peer.p2p import identity
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream
from peer.rounds.contribution import Vector
from peer.rounds.types import Group, Link, Outcome
from tests.swarm.support.attacks import Unguarded

PROTOCOL = "noloco/benchmark/1"
WAIT = 60.0


@contextlib.contextmanager
def peer_node(key: Path, initial_peers: Sequence[str] = ()) -> Iterator[MemberNode]:
    """A started node on free ports of 127.0.0.1, with direct connections for parts, as a peer has them by default."""
    identity.load_or_create(key)
    member = MemberIdentity("bench", "bench", "c", "{}", "layout")
    settings = NodeSettings(key, "127.0.0.1", 0, initial_peers=tuple(initial_peers), bulk_port="auto")
    node = MemberNode(settings, None, member)
    try:
        node.start()
        yield node
    finally:
        node.stop()


def bench_exchange(node: MemberNode, numel: int) -> PairExchange:
    """An fp32 exchange that accepts any contribution."""
    return PairExchange(network=node, numel=numel, codec=Cast("none"), settings=ExchangeConfig(), guard=Unguarded())


class Pairing:
    """Groups of two with a partner that opens one stream per swap."""

    def __init__(self, node: MemberNode, numel: int) -> None:
        self._node, self._numel = node, numel
        self._streams: Queue[Stream] = Queue()
        node.call(node.serve(PROTOCOL, self._arrived), WAIT)

    async def _arrived(self, stream: Stream) -> None:
        self._streams.put(stream)

    def wait_for_partner(self) -> None:
        """Wait for the partner's first stream."""
        self._streams.put(self._streams.get(timeout=WAIT))

    def exchange(self) -> PairExchange:
        """A new exchange with its own buffer."""
        return bench_exchange(self._node, self._numel)

    def next_group(self) -> Group:
        """The group on the partner's next stream."""
        return group_of(self._streams.get(timeout=WAIT))


def group_of(stream: Stream) -> Group:
    """A group with the remote peer of ``stream``."""
    return Group(0, (Link(stream.remote, "partner", stream),))


def _partner(address: str, numel: int) -> None:
    with tempfile.TemporaryDirectory() as folder, peer_node(Path(folder) / "key", [address]) as node:
        exchange = bench_exchange(node, numel)
        vector = Vector(torch.randn(numel))
        for _ in range(2):
            stream = node.call(node.open(address.rpartition("/p2p/")[2], PROTOCOL), WAIT)
            averaged = exchange.average(vector, group_of(stream))
            assert averaged.outcome is Outcome.MERGED, averaged.detail


if __name__ == "__main__":
    logs.quiet_libraries()
    _partner(sys.argv[1], int(sys.argv[2]))
