"""The two ends of tests.benchmarks.wan_goodput: swaps, and the same bytes over bare lines.

python -m tests.benchmarks.goodput_ends serve HOST KEY                                   answers
python -m tests.benchmarks.goodput_ends move HOST KEY ADDRESS PORT NUMEL COUNT           one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import torch

from peer import logs
from peer.p2p import identity
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream
from peer.process import keep_freed_memory
from peer.rounds.contribution import Averaged, Vector
from peer.rounds.types import Outcome
from tests.benchmarks.bare_lines import PlainLines, TLSLines
from tests.benchmarks.swap_partner import WAIT, bench_exchange, group_of

SWAP, BARE = "noloco/goodput/1", "noloco/bare/1"
PART = 2**20
WARM_UP = 2**20  # elements: the least that goes over direct connections
STREAMS = 4  # of the row with several p2p streams


def node_on(
    host: str,
    key: Path,
    initial: tuple[str, ...] = (),
    member: MemberIdentity | None = None,
    *,
    direct: bool = False,
) -> Node:
    """A started node; ``direct``: with direct connections."""
    identity.load_or_create(key)
    settings = NodeSettings(key, host, 0, initial_peers=initial, bulk_port="auto" if direct else "off")
    node = Node(settings) if member is None else MemberNode(settings, None, member)
    node.start()
    return node


async def bare(stream: Stream, size: int) -> None:
    """``size`` bytes in both directions together: no digest, no copy into a tensor, no verification."""
    block = bytes(PART)

    async def send() -> None:
        for _ in range(size // PART):
            await stream.write(block, WAIT)

    async def receive() -> None:
        room = memoryview(bytearray(PART))
        for _ in range(size // PART):
            await stream.read_into(room, WAIT)

    await asyncio.gather(send(), receive())
    done = memoryview(bytearray(1))
    if stream.initiator:
        await stream.write(b"!", WAIT)
        await stream.read_into(done, WAIT)
    else:
        await stream.read_into(done, WAIT)
        await stream.write(b"!", WAIT)
        await stream.until_closed(WAIT)
    stream.close()


def serve(host: str, key: Path) -> None:
    """Until the input ends."""
    node = node_on(host, key, direct=True)

    @cache
    def own(numel: int) -> Callable[[Stream], Averaged]:
        exchange, vector = bench_exchange(node, numel), Vector(torch.randn(numel))
        return lambda stream: exchange.average(vector, group_of(stream))

    async def swap(stream: Stream) -> None:
        await node.loop.run_in_executor(None, own(int(await stream.reader.readline())), stream)

    async def answer_bare(stream: Stream) -> None:
        await bare(stream, int(await stream.reader.readline()))

    for protocol, handler in ((SWAP, swap), (BARE, answer_bare)):
        node.call(node.serve(protocol, handler), WAIT)
    plain, tls = PlainLines.listening(host), TLSLines.listening(host)
    print(node.addresses[0], f"{plain.port},{tls.port}", flush=True)
    sys.stdin.read()
    node.stop()


class Mover:
    """The side that begins. Figures by kind: ``seconds`` of wall clock, ``processor`` seconds of this side."""

    def __init__(self, host: str, key: Path, address: str, ports: str, numel: int) -> None:
        self._node = node_on(host, key, (address,), direct=True)
        self._remote, self._host = address.rpartition("/p2p/")[2], address.split("/")[2]
        self._plain, self._tls = map(int, ports.split(","))
        self._connections = 1
        for self._numel in (WARM_UP, numel):  # what is done once, and its memory; then the first swap of its size
            self._exchange, self._vector = bench_exchange(self._node, self._numel), Vector(torch.randn(self._numel))
            for direct in (True, False):
                self._swap(direct=direct)
        self.seconds, self.processor = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def move(self, count: int) -> None:
        """All kinds in turn, ``count`` times."""
        kinds: dict[str, Callable[[], float]] = {
            "swap": lambda: self._swap(direct=True),
            "stream": lambda: self._swap(direct=False),
            "bare": lambda: self._bare(1),
            "streams": lambda: self._bare(STREAMS),
            "tcp": lambda: PlainLines.exchange(self._host, self._plain, 4 * self._numel, self._connections),
            "tls": lambda: TLSLines.exchange(self._host, self._tls, 4 * self._numel, self._connections),
            "tcp_one": lambda: PlainLines.exchange(self._host, self._plain, 4 * self._numel, 1),
        }
        for _ in range(count):
            for kind, work in kinds.items():
                before = _processor()
                self.seconds[kind].append(work())
                self.processor[kind].append(_processor() - before)
        self._node.stop()

    def figures(self) -> dict[str, object]:
        """As JSON. ``connections``: each way, of the last swap."""
        return {"seconds": self.seconds, "processor": self.processor, "connections": self._connections}

    def _open(self, protocol: str, size: int) -> Stream:
        stream = self._node.call(self._node.open(self._remote, protocol), WAIT)
        self._node.call(stream.write(f"{size}\n".encode(), WAIT), WAIT)
        return stream

    def _swap(self, *, direct: bool) -> float:
        stream = self._open(SWAP, self._numel)
        if not direct:
            stream.bulk_port = None
        began = time.perf_counter()
        averaged = self._exchange.average(self._vector, group_of(stream))
        seconds = time.perf_counter() - began
        assert averaged.outcome is Outcome.MERGED, averaged.detail
        assert (stream.direct is not None) == direct
        if stream.direct is not None:
            self._connections = max(1, stream.direct.opened // 2)
        return seconds

    def _bare(self, count: int) -> float:
        streams = [self._open(BARE, 4 * self._numel // count) for _ in range(count)]

        async def all_of_them() -> None:
            await asyncio.gather(*(bare(stream, 4 * self._numel // count) for stream in streams))

        began = time.perf_counter()
        self._node.call(all_of_them(), WAIT)
        return time.perf_counter() - began


def _processor() -> float:
    """Seconds of this process and its daemon so far."""
    own = psutil.Process()
    return sum(sum(it.cpu_times()[:2]) for it in [own, *own.children(recursive=True)])


if __name__ == "__main__":
    logs.quiet_libraries()
    keep_freed_memory()
    if sys.argv[1] == "serve":
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        mover = Mover(sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]))
        mover.move(int(sys.argv[7]))
        print(json.dumps(mover.figures()))
