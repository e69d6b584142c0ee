"""Goodput of one swap of 64 MiB: on links of 100 Mbit/s, and on loopback against hivemind's bare streams.

One link has a delay from the delay line, a process on the same cores. The other is the kernel's, without a delay.

After each swap the same bytes go over a bare hivemind stream and over plain TCP: the limit of link and cores.

python -m tests.benchmarks.wan_goodput [--quick] [--json FILE]
python -m tests.benchmarks.wan_goodput serve HOST KEY          answers swaps and bare exchanges
python -m tests.benchmarks.wan_goodput swap HOST KEY ADDRESS PORT NUMEL COUNT     one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from peer import logs
from peer.p2p import identity
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import Node, NodeSettings
from peer.p2p.stream import Stream
from peer.rounds.contribution import Vector
from peer.rounds.types import Outcome
from tests.benchmarks.common import finish, options
from tests.benchmarks.swap_partner import WAIT, bench_exchange, group_of
from tests.netlab.lab import ROOT, Lab
from tests.netlab.plan import Access, Path_, Plan
from tests.netlab.wire import Wire, wire

SWAP, BARE = "noloco/goodput/1", "noloco/bare/1"
NUMEL = 16 * 2**20  # 64 MiB of fp32
PART = 2**20
MBIT = 100.0


def node_on(host: str, key: Path, initial: tuple[str, ...] = (), member: MemberIdentity | None = None) -> Node:
    identity.load_or_create(key)
    settings = NodeSettings(key, host, 0, initial_peers=initial)
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
    node = node_on(host, key)
    loop = node.loop

    async def swap(stream: Stream) -> None:
        numel = int(await stream.reader.readline())
        exchange = bench_exchange(node, numel)
        await loop.run_in_executor(None, exchange.average, Vector(torch.randn(numel)), group_of(stream))

    async def answer_bare(stream: Stream) -> None:
        await bare(stream, int(await stream.reader.readline()))

    async def answer_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer_bare(Stream(reader, writer, "", initiator=False))

    for protocol, handler in ((SWAP, swap), (BARE, answer_bare)):
        node.call(node.serve(protocol, handler), WAIT)
    plain = node.call(asyncio.start_server(answer_tcp, host, 0), WAIT)
    print(node.addresses[0], plain.sockets[0].getsockname()[1], flush=True)
    sys.stdin.read()
    node.stop()


def swap(host: str, key: Path, address: str, port: int, numel: int, count: int) -> dict[str, list[float]]:
    """Seconds of swaps and bare exchanges, which alternate."""
    node = node_on(host, key, (address,))
    remote = address.rpartition("/p2p/")[2]
    exchange, vector = bench_exchange(node, numel), Vector(torch.randn(numel))
    seconds: dict[str, list[float]] = {"swap": [], "bare": [], "tcp": []}

    def time_bare(kind: str, stream: Stream) -> None:
        node.call(stream.write(f"{4 * numel}\n".encode(), WAIT), WAIT)
        began = time.perf_counter()
        node.call(bare(stream, 4 * numel), WAIT)
        seconds[kind].append(time.perf_counter() - began)

    for _ in range(count):
        stream = node.call(node.open(remote, SWAP), WAIT)
        node.call(stream.write(f"{numel}\n".encode(), WAIT), WAIT)
        began = time.perf_counter()
        averaged = exchange.average(vector, group_of(stream))
        seconds["swap"].append(time.perf_counter() - began)
        assert averaged.outcome is Outcome.MERGED, averaged.detail
        time_bare("bare", node.call(node.open(remote, BARE), WAIT))
        reader, writer = node.call(asyncio.open_connection(address.split("/")[2], port), WAIT)
        time_bare("tcp", Stream(reader, writer, "", initiator=True))
    node.stop()
    return seconds


def _pair(lab: Lab | Wire | None, count: int) -> dict[str, list[float]]:
    def command(host: int, *arguments: str) -> list[str]:
        words = [sys.executable, "-m", "tests.benchmarks.wan_goodput", *arguments]
        return words if lab is None else lab.command(host, words)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = ["127.0.0.1"] * 2 if lab is None else [lab.address(0), lab.address(1)]
        server = stack.enter_context(
            subprocess.Popen(
                command(0, "serve", hosts[0], str(folder / "a")),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(server.terminate)
        assert server.stdout is not None
        client = command(
            1, "swap", hosts[1], str(folder / "b"), *server.stdout.readline().split(), str(NUMEL), str(count)
        )
        done = subprocess.run(client, cwd=ROOT, capture_output=True, text=True, timeout=400, check=True)
        found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
        return found


def measure(*, quick: bool) -> dict[str, float]:
    """Medians of the goodput as a share of the link's or the bare stream's goodput."""
    count = 1 if quick else 5
    with Lab(Plan(access=Access(up_mbit=MBIT, down_mbit=MBIT), path=Path_(rtt_ms=20)), 2) as lab:
        delayed = _shares(_pair(lab, count))
    with wire(MBIT) as hosts:
        straight = _shares(_pair(hosts, count))
    local = _pair(None, 3 if quick else 9)
    ratios = [bare / swap for swap, bare in zip(local["swap"], local["bare"], strict=True)]
    return {
        **{f"link_100mbit{kind}": share for kind, share in delayed.items()},
        **{f"kernel_100mbit{kind}": share for kind, share in straight.items()},
        "loopback": median(ratios),
    }


def _shares(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Goodputs as shares of the link's rate."""
    names = {"swap": "", "bare": "_bare", "tcp": "_tcp"}
    return {names[kind]: 32e-6 * NUMEL / median(it) / MBIT for kind, it in seconds.items()}


def main() -> None:
    args = options("the goodput of a swap")
    found = measure(quick=args.quick)
    words = f"a swap gets {found['link_100mbit']:.0%} of 100 Mbit/s and {found['loopback']:.0%} of a bare stream"
    finish("wan_goodput", {"goodput_share": found}, f"{words} on loopback", args)


if __name__ == "__main__":
    logs.quiet_libraries()
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] != ["swap"]:
        main()
    else:
        print(json.dumps(swap(sys.argv[2], Path(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:8]))))
