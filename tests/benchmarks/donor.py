"""The cost of state transfer for a donor: tokens/s of its inner loop while a newcomer downloads its state.

python -m tests.benchmarks.donor [--quick] [--json FILE]
python -m tests.benchmarks.donor store|take      (started by the benchmark)

The network laboratory has three hosts: a peer that trains the demo's model, a process that only serves such a state
(the store) and a newcomer. The newcomer downloads from the peer for some seconds, then from the store, then rests.
All share two cores with the delay line. A download from the store shows the loss that the shared cores cause. The
further loss during a download from the peer is the cost of being a donor.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash

from peer import logs
from peer.config import load as settings
from peer.config.digest import canonical, digest
from peer.data.corpus import load as load_text
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import OPEN_TIMEOUT
from peer.process import LoopContext
from peer.rounds.types import Seat
from peer.swarm.directory.reader import Reader
from peer.swarm.state_transfer.donor import STATE_PROTOCOL, Donor
from peer.swarm.state_transfer.join import take_from
from peer.training import replica
from peer.training.state import PeerState
from tests.benchmarks.common import finish, options
from tests.benchmarks.goodput_ends import node_on
from tests.netlab.peers import LabSwarm
from tests.netlab.plan import load
from tests.unit.parts import context_of
from tests.whole_tail import WholeTail

CONFIG = "configs/demo.yaml"
TURN = 12.0  # seconds of each download, and of each rest
SETS = (
    *("run.steps=100000000", "run.inner_steps=5", "peer.start_with=1"),
    *("run.exchange.overlap=false", "run.exchange.codec=none"),
    *("run.evaluation.every_rounds=1000000", "peer.checkpoint.every_rounds=1000000"),
)


@dataclass(frozen=True)
class Side:
    """The store's or the newcomer's process."""

    node: MemberNode
    state: PeerState

    @classmethod
    @contextmanager
    def started(cls, address: str, own: str) -> Iterator[Side]:
        config = settings.load(Path(CONFIG), list(SETS))
        run = config.run
        state = replica.replica(
            config, load_text(run.data).train, stream=0, device=torch.device("cpu"), context=LoopContext()
        )
        with tempfile.TemporaryDirectory() as folder:
            layout = xxhash.xxh3_128_hexdigest(state.outer.slow.layout().encode())
            me = MemberIdentity("side", run.name, digest(run), canonical(run), layout)
            node = node_on(own, Path(folder) / "key", (address,), me)
            yield cls(node, state)
            node.stop()

    def serve(self, until: float) -> None:
        """Print where the state is served, and serve it."""
        donor = Donor(self.state.snapshot, self.node.proven)
        self.node.call(self.node.serve_members(STATE_PROTOCOL, donor.serve), OPEN_TIMEOUT)
        print(self.node.addresses[0], flush=True)
        time.sleep(max(0.0, until - time.monotonic()))

    def take(self, store: str, until: float) -> None:
        """Print ``kind begin end states`` for each turn, by the machine's monotonic clock."""
        room = [torch.empty_like(vector) for vector in self.state.vectors()]
        (record,) = Reader(self.node, self.node.member.run).refresh_all()
        context, most = context_of(self.node, None), (math.inf, math.inf)
        peer = Seat(record.peer_id, "peer", tuple(record.addresses))
        seats = {"peer": peer, "store": Seat(store.rpartition("/p2p/")[2], "store", (store,)), "rest": None}
        while time.monotonic() < until:
            for kind, seat in seats.items():
                begin, states = time.monotonic(), 0
                while seat is not None and time.monotonic() < begin + TURN:
                    states += take_from(context, seat, room, 60.0, most) is not None
                time.sleep(max(0.0, begin + TURN - time.monotonic()))
                print(kind, begin, time.monotonic(), states, flush=True)


def measure(seconds: float, folder: Path) -> dict[str, Any]:
    """The peer's rounds, sorted by what the newcomer did during the whole round."""
    with LabSwarm(load("home"), 3, folder) as swarm:
        swarm.peer(1, "peer", CONFIG, SETS)
        tail = WholeTail("peer", folder / "peer")
        swarm.wait_for(lambda: len(tail.poll()) + len(tail.rounds) > 3)
        until = time.monotonic() + seconds

        def side(host: int, role: str, *more: str) -> Any:
            words = " ".join((role, swarm.address, swarm.lab.address(host), str(until), *more))
            return swarm.start(host, "tests.benchmarks.donor", [role], folder / f"{role}.log", {"SIDE": words})

        side(2, "store")
        swarm.wait_for(lambda: "/p2p/" in (folder / "store.log").read_text())
        taker = side(3, "take", (folder / "store.log").read_text().split()[-1])
        rounds: list[tuple[float, float, float]] = []  # begin, end, tokens/s
        while taker.poll() is None and time.monotonic() < until + 120:
            for row in tail.poll():
                now = time.monotonic()
                rounds.append((now - sum(row["seconds"].values()), now, row["tokens_per_second"]))
            time.sleep(0.02)
        words = [line.split() for line in (folder / "take.log").read_text().splitlines()]
    speeds: dict[str, list[float]] = {"peer": [], "store": [], "rest": []}
    turns = [(it[0], float(it[1]), float(it[2]), int(it[3])) for it in words if it and it[0] in speeds]
    for kind, begin, end, _ in turns:
        speeds[kind] += [speed for start, stop, speed in rounds if begin < start and stop < end]
    return {
        "tokens_per_s_ratio": median(speeds["peer"]) / median(speeds["store"]),
        "store_to_rest": median(speeds["store"]) / median(speeds["rest"]),
        "states": {kind: sum(it[3] for it in turns if it[0] == kind) for kind in ("peer", "store")},
        "phases": {kind: len(it) for kind, it in speeds.items()},
    }


def main() -> None:
    args = options("the cost of newcomers for a donor")
    with tempfile.TemporaryDirectory(prefix="donor-") as folder:
        found = measure(60.0 if args.quick else 300.0, Path(folder))
    words = (
        f"tokens/s of a peer that serves its state: {found['tokens_per_s_ratio']:.3f} of those while the store does "
        f"(which are {found['store_to_rest']:.3f} of those at rest); {found['states']['peer']} states of 8 MB at "
        f"10 Mbit/s, {found['phases']['peer']} inner phases of 5 steps"
    )
    finish("donor", found, words, args)


if __name__ == "__main__":
    if sys.argv[1:] in (["store"], ["take"]):
        logs.quiet_libraries()
        role, address, own_host, end, *more = os.environ["SIDE"].split()
        with Side.started(address, own_host) as side:
            side.serve(float(end) + 30) if role == "store" else side.take(more[0], float(end))
    else:
        main()
