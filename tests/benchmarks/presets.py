"""The papers' presets over lines of 100 Mbit/s: how many rounds merge, and what is waited, in the model of time.

python -m tests.benchmarks.presets [--quick] [--json FILE]

An inner step takes 6 operations a token and parameter (without those of the input embedding), 8 with gradient
checkpointing, at a set rate of the GPU. Each method has its paper's H and makes as many inner steps.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from peer.commands.simulate.network.conditions import Conditions
from peer.commands.simulate.network.methods import groups, pairs
from peer.config import load as settings
from peer.config.schema import CodecName
from peer.exchange.codec import size
from peer.replica import model
from tests.benchmarks.common import finish, options

PRESETS = {"125m": (8, 65e12), "1.3b": (16, 65e12), "6.8b": (16, 400e12)}  # peers, operations a second
METHODS = {"noloco": pairs, "diloco": groups}
CODECS: tuple[CodecName, ...] = ("int8", "int4")
STEPS = 1000
MBIT = 125_000  # bytes
SEEDS = 5


def conditions(name: str, method: str, codec: CodecName) -> Conditions:
    """Those of a preset with its paper's number of peers, 10 ms one way."""
    peers, rate = PRESETS[name]
    config = settings.load([Path(f"configs/models/llama-{name}.yaml"), Path(f"configs/methods/{method}.yaml")], [])
    run, own = config.run, config.peer
    outline: Any = model.outline(run)
    numel = model.parameter_count(outline)
    multiplied = numel - outline.get_input_embeddings().weight.numel()
    operations = 8 if own.gradient_checkpointing else 6
    return Conditions(
        peers=peers,
        rounds=STEPS // run.inner_steps,
        inner_steps=run.inner_steps,
        payload=size("none", numel),
        step_seconds=operations * multiplied * run.batch_size * run.data.sequence_length / rate,
        latency=0.01,
        up=100 * MBIT,
        down=100 * MBIT,
        stall=run.exchange.stall,
        max_phases=run.exchange.max_phases,
        overlap=run.exchange.overlap,
        coded=size(codec, numel) / size("none", numel),
        window=run.rendezvous.window,
    )


def figures(name: str, method: str, codec: CodecName, seeds: int) -> dict[str, float]:
    """Means over the seeds."""
    it = conditions(name, method, codec)
    rows = [asdict(METHODS[method](it, seed)) for seed in range(seeds)]
    keys = ("seconds", "end_seconds", "idle_in_all", "merged_share", "bytes_per_round")
    return {"step_seconds": it.step_seconds, "rounds": it.rounds, **{key: mean(it[key] for it in rows) for key in keys}}


def main() -> None:
    args = options("the papers' presets in the model of time")
    seeds = 1 if args.quick else SEEDS
    table = {
        f"{name} {method} {codec}": figures(name, method, codec, seeds)
        for name in PRESETS
        for method in METHODS
        for codec in CODECS
    }
    words = ", ".join(
        f"{name}: {row['merged_share']:.0%} merged, {row['idle_in_all']:.1%} waited" for name, row in table.items()
    )
    finish("presets", {"presets": table}, words, args)


if __name__ == "__main__":
    main()
