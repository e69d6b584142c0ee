"""A peer without inner steps: random initial weights, then rounds of swap and outer step.

python -m tests.swarm.programs.averaging_peer KEY SEED ROUNDS NUMEL [ADDRESS] [--stall-after-part | --corrupt]

Without ADDRESS it listens, with one it dials; each round has one stream. It prints ``address``, then a line per round
with the outcome and the first weights. With ``--stall-after-part`` it prints ``stalling`` after the first part of its
contribution has been read and stops for a minute, so that a test can kill or freeze it during a swap.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from queue import Queue

import torch
from torch import Tensor, nn

from peer import logs
from peer.config.methods import NoLoCoConfig
from peer.config.schema import ExchangeConfig
from peer.exchange.codec import Cast
from peer.exchange.pair.blocking import PairExchange
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.p2p import identity
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream
from peer.rounds.contribution import Contribution
from peer.rounds.types import Group, Link
from tests.swarm.support.attacks import Unguarded

PROTOCOL = "noloco/averaging-test/1"
SETTINGS = ExchangeConfig(stall=3.0)


class Stalling:
    """A contribution that stalls after its first part, while that part is in flight."""

    def __init__(self, inner: Contribution) -> None:
        self._inner, self.numel = inner, inner.numel

    def read(self, start: int, out: Tensor) -> None:
        if start:
            print("stalling", flush=True)
            time.sleep(60)
        self._inner.read(start, out)

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        self._inner.read_both(start, out, change)


class Weights(nn.Module):
    """Flat weights, different for each seed."""

    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(seed)))


def main() -> None:
    key, seed, rounds, numel = sys.argv[1], *map(int, sys.argv[2:5])
    address = next((word for word in sys.argv[5:] if word.startswith("/")), None)
    logs.quiet_libraries()
    identity.load_or_create(Path(key))
    node = Node(NodeSettings(Path(key), "127.0.0.1", 0, initial_peers=(address,) if address else ()))
    node.start()
    arrived: Queue[Stream] = Queue()

    async def arrive(stream: Stream) -> None:
        arrived.put(stream)

    node.call(node.serve(PROTOCOL, arrive), 10)
    print(f"address {node.addresses[0]}", flush=True)
    outer = NoLoCo(SlowWeights(Weights(numel, seed).named_parameters()), NoLoCoConfig())
    exchange = PairExchange(network=node, numel=numel, codec=Cast("none"), settings=SETTINGS, guard=Unguarded())
    for number in range(rounds):
        if address:
            stream = node.call(node.open(address.rpartition("/p2p/")[2], PROTOCOL, [address]), 10)
        else:
            stream = arrived.get(timeout=60)
        own: Contribution = outer.contribution()
        if "--stall-after-part" in sys.argv:
            own = Stalling(own)
        before = state(outer)
        began = time.monotonic()
        averaged = exchange.average(own, Group(number, (Link(stream.remote, "partner", stream),)))
        took = time.monotonic() - began
        untouched = torch.equal(before, state(outer))
        print(f"swap {number} {averaged.outcome} seconds={took:.2f} untouched={untouched}", flush=True)
        outer.apply(averaged.mean)
    print("weights", *(f"{value:.6f}" for value in outer.slow.phi[:20].tolist()), flush=True)
    node.stop()


def state(outer: NoLoCo) -> Tensor:
    """φ, δ and θ as one vector."""
    theta = torch.empty(outer.slow.numel)
    outer.slow.read_fast(0, theta)
    return torch.cat([outer.slow.phi, outer.momentum, theta])


if __name__ == "__main__":
    main()
