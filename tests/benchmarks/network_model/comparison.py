"""``simulate --network`` against real peers in the network laboratory, and what a peer sends for the swarm itself.

python -m tests.benchmarks.network_model [--quick] [--json FILE]

The peers' inner steps are log-normal sleeps (sleeping_peer.py); every fourth peer has 0.6 of the speed. The links have
10 Mbit/s up, 50 down and 60 ms. Model and measurement have the same number of rounds. Their total time and their idle
share must agree within 15%. The swarm's own traffic is that of presences without weights (presence.py), three runs of
each size. Runs in FILE's ``.runs.json`` are not repeated.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from peer.commands.simulate.network.conditions import Conditions, Figures
from peer.commands.simulate.network.methods import groups, pairs
from peer.config import load as settings
from peer.exchange.codec import size
from peer.replica import model
from peer.swarm.directory import buckets as directory
from peer.swarm.directory import records
from tests.benchmarks.common import Known, finish, options
from tests.benchmarks.network_model.presence import in_a_network
from tests.netlab.peers import LabSwarm
from tests.netlab.plan import load

SPEEDS = (1.0, 1.0, 1.0, 0.6)
STEP, SIGMA, H = 0.3, 0.2, 25
SEEDS = 20  # of the model
METHODS = {"noloco": ("configs/demo.yaml", pairs), "diloco": ("configs/demo-diloco.yaml", groups)}
WAIT = 120.0  # seconds on top of the model's time


def overrides(rounds: int) -> tuple[str, ...]:
    """One more round than is compared: at the end of a run phases are shorter."""
    steps = f"run.steps={(rounds + 1) * H}"
    often = ("run.evaluation.every_rounds=1000", "run.evaluation.batches=1", "run.batch_size=1")
    swap = ("run.exchange.overlap=false", "run.exchange.codec=none")
    return (steps, f"run.inner_steps={H}", *swap, *often)


def conditions(peers: int, rounds: int) -> Conditions:
    """The conditions of :func:`measured`."""
    run = settings.load(Path("configs/demo.yaml"), []).run
    numel = model.parameters_of(run)
    return Conditions(
        peers=peers,
        rounds=rounds,
        inner_steps=H,
        payload=size("none", numel),
        step_seconds=STEP,
        step_sigma=SIGMA,
        speeds=SPEEDS,
        latency=0.03,
        latency_sigma=0.0,
    )


def measured(name: str, it: Conditions, folder: Path) -> dict[str, float]:
    """The model's figures, measured on real peers."""
    rows = run(METHODS[name][0], overrides(it.rounds), it, folder)
    peers = [[row for row in peer if row["step"] <= it.rounds * H] for peer in rows]
    seconds = [sum(sum(row["seconds"].values()) for row in peer) for peer in peers]
    idle = sum(row["seconds"]["match"] + row["seconds"]["exchange"] for peer in peers for row in peer)
    every = [row for peer in peers for row in peer]
    return {
        "seconds": max(seconds),
        "idle_share": idle / sum(seconds),
        "merged_share": mean(row["outcome"] == "merged" for row in every),
        "match_seconds": mean(row["seconds"]["match"] for row in every),
        "swap_seconds": median(row["seconds"]["exchange"] for row in every if row["outcome"] == "merged"),
    }


def run(config: str, sets: tuple[str, ...], it: Conditions, folder: Path) -> list[Any]:
    """Each peer's rounds."""
    names = [f"peer-{index}" for index in range(it.peers)]
    with LabSwarm(load("home"), it.peers, folder) as swarm:
        processes = []
        for index, name in enumerate(names):
            speed = it.speeds[index % len(it.speeds)]
            own = {"STEP_SECONDS": str(it.step_seconds / speed), "STEP_SIGMA": str(it.step_sigma)}
            module = "tests.benchmarks.network_model.sleeping_peer"
            processes.append(swarm.peer(index + 1, name, config, sets, module=module, environment=own))
        swarm.wait_for(lambda: all((folder / name / "rounds.jsonl").exists() for name in names), 240)
        began = time.monotonic()
        slowest = (it.rounds + 2) * (H * STEP / min(it.speeds) + 10)
        while any(process.poll() is None for process in processes):
            if time.monotonic() - began > slowest + WAIT:
                raise RuntimeError(f"not done within {slowest + WAIT:.0f} s; see {folder}")
            time.sleep(1)
        return [swarm.tail(name).rounds for name in names]


def directory_traffic(members: int) -> dict[str, float]:
    """A peer's directory writes and reads per minute, by the rules of swarm/directory."""
    ids, periods = [str(index) for index in range(members)], 60 / records.ANNOUNCE_SECONDS
    renewals = periods / math.ceil(records.WRITTEN_FOR / records.ANNOUNCE_SECONDS)
    full = Counter(bucket for peer in ids for bucket in directory.writes(peer, members))
    chance, sample = random.Random(0), ids[:: max(1, members // 100)]
    buckets = []
    for peer in sample:
        size, own = directory.SwarmSize(members), directory.writes(peer, members)
        for _ in range(directory.WIDE_LOOKS):
            buckets.append(size.look(directory.READS, chance))
            size.learn({bucket: full[bucket] - (bucket in own) for bucket in buckets[-1]})
    return {
        "records_written": renewals * mean(len(directory.writes(peer, members)) for peer in sample),
        "buckets_read": periods * mean(len(it) for it in buckets),
        "records_read": periods * mean(sum(full[bucket] for bucket in it) for it in buckets),
    }


def modelled(name: str, it: Conditions) -> dict[str, float]:
    """The model's figures, means over the seeds."""
    rows: list[Figures] = [METHODS[name][1](it, seed) for seed in range(SEEDS)]
    return {key: mean(getattr(row, key) for row in rows) for key in ("seconds", "idle_share", "merged_share")}


def compared(size: int, name: str, rounds: int) -> dict[str, Any]:
    """Real peers against the model."""
    it = conditions(size, rounds)
    with tempfile.TemporaryDirectory(prefix=f"model-{name}-") as folder:
        real = measured(name, it, Path(folder))
    guess = modelled(name, it)
    return {
        "measured": real,
        "modelled": guess,
        "off": {key: guess[key] / real[key] - 1 for key in ("seconds", "idle_share")},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Least, median and most."""
    return {"least": min(values), "median": median(values), "most": max(values)}


def main() -> None:
    args = options("the network model against the laboratory")
    sizes, rounds = ((4,), 3) if args.quick else ((8, 16), 12)
    known = Known("network_model", args)
    table = {
        name: known.get(name, partial(compared, size, method, rounds))
        for size in sizes
        for method in METHODS
        for name in [f"{method} N={size}"]
    }
    small, runs = ((4,), 1) if args.quick else ((4, 8, 16, 24), 3)
    own = {
        str(size): spread(
            [
                known.get(f"presence N={size} run {number}", partial(in_a_network, size))["mb_per_minute"]
                for number in range(runs)
            ]
        )
        for size in small
    }
    many = {str(size): directory_traffic(size) for size in (8, 16, 64, 256, 1024, 10_000)}
    worst = max(abs(value) for row in table.values() for value in row["off"].values())
    words = f"the model is within {worst:.0%} of what real peers did, in time and in idle share; a peer sends for the "
    words += "swarm " + ", ".join(f"{it['median']:.2f} MB a minute among {size}" for size, it in own.items())
    finish(
        "network_model",
        {"table": table, "worst": worst, "directory_mb_per_minute": own, "directory_a_minute": many},
        words,
        args,
    )
