"""What it costs a member that newcomers take its state: tokens/s of its inner loop while one takes it.

python -m tests.benchmarks.donor [--quick] [--json FILE]
python -m tests.benchmarks.donor store|take      (started by the benchmark)

In the network laboratory: a peer that trains the demo's model on one host, on another one a process that only has such
a state to give (the store), on a third one a newcomer. It takes the state of the peer for some seconds, then that of
the store, then rests. All share two cores with the line between them, so what the peer loses beside the store's
newcomer is lost to these, and what it loses more beside its own is the price of being a donor.
"""

from __future__ import annotations

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

from peer import logs
from peer.commands.local_swarm.tail import Tail
from peer.config import load as settings
from peer.config.digest import canonical, digest
from peer.data.corpus import load as load_text
from peer.exchange.pair.wire import layout_digest
from peer.p2p.node import Node
from peer.process import LoopContext
from peer.rounds.types import Seat
from peer.swarm.directory.directory import Members
from peer.swarm.directory.records import MemberRecord
from peer.swarm.party import Party
from peer.swarm.state_transfer.donor import Donor, start_serving
from peer.swarm.state_transfer.download import take_state_of
from peer.training import replica
from peer.training.state import PeerState
from tests.benchmarks.common import finish, options
from tests.benchmarks.wan_goodput import node_on
from tests.netlab.peers import LabSwarm
from tests.netlab.plan import load

CONFIG = "configs/demo.yaml"
TURN = 12.0  # seconds of taking, and of resting
SETS = (
    *("run.steps=100000000", "run.inner_steps=5", "peer.start_with=1"),
    *("run.evaluation.every_rounds=1000000", "peer.checkpoint.every_rounds=1000000"),
)


@dataclass(frozen=True)
class Side:
    """A process beside the peer that trains."""

    node: Node
    me: Party
    state: PeerState
    layout: str

    @classmethod
    @contextmanager
    def started(cls, address: str, own: str) -> Iterator[Side]:
        config = settings.load(Path(CONFIG), list(SETS))
        run = config.run
        state = replica.replica(
            config, load_text(run.data).train, stream=0, device=torch.device("cpu"), context=LoopContext()
        )
        with tempfile.TemporaryDirectory() as folder:
            node = node_on(own, Path(folder) / "key", (address,))
            me = Party("side", run.name, digest(run), canonical(run))
            yield cls(node, me, state, layout_digest(state.outer.slow.layout()))
            node.stop()

    def serve(self, until: float) -> None:
        """Print where the state is to be had, and give it."""
        start_serving(self.node, Donor(self.me, self.layout, self.state.snapshot))
        print(self.node.addresses[0], flush=True)
        time.sleep(max(0.0, until - time.monotonic()))

    def take(self, store: str, until: float) -> None:
        """Print ``kind begin end states`` of each turn, by the machine's monotonic clock."""
        room = [torch.empty_like(vector) for vector in self.state.vectors()]
        (record,) = Members(self.node, self.me.run, _nobody).refresh_all()
        peer = Seat(record.peer_id, "peer", tuple(record.addresses))
        seats = {"peer": peer, "store": Seat(store.rpartition("/p2p/")[2], "store", (store,)), "rest": None}
        while time.monotonic() < until:
            for kind, seat in seats.items():
                begin, states = time.monotonic(), 0
                while seat is not None and time.monotonic() < begin + TURN:
                    states += take_state_of(self.node, seat, self.me, self.layout, room, 60.0) is not None
                time.sleep(max(0.0, begin + TURN - time.monotonic()))
                print(kind, begin, time.monotonic(), states, flush=True)


def _nobody() -> MemberRecord:
    raise AssertionError("a newcomer that never enters has no record")


def measure(seconds: float, folder: Path) -> dict[str, Any]:
    """The peer's rounds, sorted by what the newcomer did in all of their time."""
    with LabSwarm(load("home"), 3, folder) as swarm:
        swarm.peer(1, "peer", CONFIG, SETS)
        tail = Tail("peer", folder / "peer")
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
    args = options("what newcomers cost a donor")
    with tempfile.TemporaryDirectory(prefix="donor-") as folder:
        found = measure(60.0 if args.quick else 300.0, Path(folder))
    words = (
        f"tokens/s of a peer that gives its state away: {found['tokens_per_s_ratio']:.3f} of those while another does "
        f"(which are {found['store_to_rest']:.3f} of those in quiet); {found['states']['peer']} states of 8 MB at "
        f"10 Mbit/s, {found['phases']['peer']} inner phases of 5 steps"
    )
    finish("donor", found, words, args.json)


if __name__ == "__main__":
    if sys.argv[1:] in (["store"], ["take"]):
        logs.quiet_libraries()
        role, address, own_host, end, *more = os.environ["SIDE"].split()
        with Side.started(address, own_host) as side:
            side.serve(float(end) + 30) if role == "store" else side.take(more[0], float(end))
    else:
        main()
