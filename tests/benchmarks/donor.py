"""What it costs a member that newcomers take its state: tokens/s of its inner loop with one on the line and without.

python -m tests.benchmarks.donor [--quick] [--json FILE]
python -m tests.benchmarks.donor take ...        (started by the benchmark: a newcomer that comes again and again)

In the network laboratory: a peer that trains the demo's model on one host, on the other one a process that takes its
state for some seconds and rests for as long. Both have a core of their own, so what is seen is the donor's own work.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from peer import build, logs, settings
from peer.config_digest import canonical, digest
from peer.corpus import load as load_text
from peer.exchange.wire import layout_digest
from peer.launch.tail import Tail
from peer.progress import Progress, Stop
from peer.swarm import identity
from peer.swarm.join import take_state
from peer.swarm.meeting import Party
from peer.swarm.members import Members
from peer.swarm.node import Node, NodeSettings
from peer.swarm.records import MemberRecord
from tests.benchmarks.common import finish, options
from tests.netlab.peers import LabSwarm
from tests.netlab.plan import load

CONFIG = "configs/demo.yaml"
TURN = 12.0  # seconds of taking, and of resting
SETS = (
    *("run.steps=100000000", "run.inner_steps=5", "peer.start_with=1"),
    *("run.evaluation.every_rounds=1000000", "peer.checkpoint.every_rounds=1000000"),
)


def take(address: str, own: str, until: float) -> None:
    """Print ``begin`` and ``end`` of each turn, and how many states came in it, by the machine's monotonic clock."""
    logs.quiet_libraries()
    config = settings.load(Path(CONFIG), list(SETS))
    run, signs = config.run, build.Signs(Progress(), Stop())
    state = build.replica(config, load_text(run.data).train, stream=0, device=torch.device("cpu"), signs=signs)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        identity.load_or_create(key)
        node = Node(NodeSettings(key, own, 0, initial_peers=(address,)))
        node.start()
        me = Party("taker", run.name, digest(run), canonical(run))
        members = Members(node, run.name, _nobody)
        layout = layout_digest(state.outer.slow.layout())
        room = [torch.empty_like(vector) for vector in state.vectors()]
        while time.monotonic() < until:
            print("begin", time.monotonic(), flush=True)
            end, count = time.monotonic() + TURN, 0
            while time.monotonic() < end:
                count += take_state(node, members, me, layout, room, 60.0, above=-1) is not None
            print("end", time.monotonic(), count, flush=True)
            time.sleep(TURN)
        node.stop()


def _nobody() -> MemberRecord:
    raise AssertionError("a newcomer that never enters has no record")


def measure(seconds: float, folder: Path) -> dict[str, float]:
    """The donor's rounds, sorted by whether a newcomer was on the line all the time or never."""
    with LabSwarm(load("home"), 2, folder) as swarm:
        swarm.peer(1, "donor", CONFIG, SETS)
        tail = Tail("donor", folder / "donor")
        swarm.wait_for(lambda: len(tail.poll()) + len(tail.rounds) > 3)
        until = time.monotonic() + seconds
        more = {"TAKE": f"{swarm.address} {swarm.lab.address(2)} {until}"}
        taker = swarm.start(2, "tests.benchmarks.donor", ["take"], folder / "taker.log", more)
        rounds: list[tuple[float, float, float]] = []  # begin, end, tokens/s
        while taker.poll() is None and time.monotonic() < until + 120:
            for row in tail.poll():
                now = time.monotonic()
                rounds.append((now - sum(row["seconds"].values()), now, row["tokens_per_second"]))
            time.sleep(0.02)
        words = [line.split() for line in (folder / "taker.log").read_text().splitlines()]
        marks = [it for it in words if it and it[0] in ("begin", "end")]
    turns = [(float(one[1]), float(two[1])) for one, two in zip(marks[::2], marks[1::2], strict=False)]
    states = sum(int(it[2]) for it in marks if it[0] == "end")
    first, last = turns[0][0], turns[-1][1]
    busy, rest = [], []
    for start, stop, speed in rounds:
        if any(begin < start and stop < end for begin, end in turns):
            busy.append(speed)
        elif first < start < last and not any(start < end and begin < stop for begin, end in turns):
            rest.append(speed)
    return {
        "tokens_per_s_ratio": median(busy) / median(rest),
        "states": states,
        "states_per_s": states / sum(end - begin for begin, end in turns),
        "rounds_busy": len(busy),
        "rounds_at_rest": len(rest),
    }


def main() -> None:
    args = options("what newcomers cost a donor")
    with tempfile.TemporaryDirectory(prefix="donor-") as folder:
        found = measure(60.0 if args.quick else 300.0, Path(folder))
    words = (
        f"tokens/s of a donor's inner loop with a newcomer on the line: {found['tokens_per_s_ratio']:.3f} of those "
        f"without ({found['states']} states of 8 MB at 10 Mbit/s; {found['rounds_busy']} inner phases of 5 steps with, "
        f"{found['rounds_at_rest']} without)"
    )
    finish("donor", found, words, args.json)


if __name__ == "__main__":
    if sys.argv[1:] == ["take"]:
        donor, own_host, end = os.environ["TAKE"].split()
        take(donor, own_host, float(end))
    else:
        main()
