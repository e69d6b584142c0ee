"""``noloco-peer simulate --network``: what it is told, prints and writes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from peer.commands.simulate.network.conditions import Conditions, Figures
from peer.commands.simulate.network.methods import groups, pairs, pairs_by_round, tree_to_pair
from peer.config.schema import Config
from peer.exchange.codec import payload_bytes
from peer.replica import model
from peer.training.run_folder import require_folder, set_aside

FIGURES_FILE = "network.json"


def conditions(config: Config, args: argparse.Namespace) -> Conditions:
    """What the options and the run's configuration say; raises :class:`peer.errors.UserError`."""
    run = config.run
    numel = model.parameters_of(run)
    found = Conditions(
        peers=args.replicas,
        rounds=args.rounds,
        inner_steps=run.inner_steps,
        payload=payload_bytes(run.exchange.codec, numel),
        step_seconds=args.step_seconds,
        step_sigma=args.step_sigma,
        speeds=tuple(args.speeds),
        latency=args.latency_ms / 1000,
        latency_sigma=args.latency_sigma,
        up=args.up_mbit * 125_000,
        down=args.down_mbit * 125_000,
        loss=args.loss,
        churn=args.churn,
        stall=run.exchange.stall,
        overlap=run.exchange.overlap,
        window=run.rendezvous.window,
    )
    found.check()
    return found


def run(config: Config, args: argparse.Namespace) -> str:
    """Model both methods and write ``network.json``; returns what to print."""
    it = conditions(config, args)
    require_folder(config.run.dir)
    set_aside(config.run.dir, [FIGURES_FILE])
    rows = [method(it, config.run.seed) for method in (pairs, pairs_by_round, groups)]
    path: Path = config.run.dir / FIGURES_FILE
    tree = tree_to_pair(it, config.run.seed)
    found = {"conditions": asdict(it), "methods": [asdict(row) for row in rows], "tree_to_pair": tree}
    text = json.dumps(found, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    ratio = rows[2].seconds / rows[0].seconds
    last = f"DiLoCo takes {ratio:.2f} times as long as NoLoCo for {it.rounds} rounds of {it.peers:,} peers"
    hops = f"By latency alone a tree all-reduce takes {tree:.1f} times as long as a pair's average"
    return "\n".join([*map(in_words, rows), last, hops, f"Figures: {path}"])


def in_words(row: Figures) -> str:
    return (
        f"{row.method}: idle {row.idle_share:.1%}, {row.merged_share:.0%} of the rounds merged, "
        f"{row.bytes_per_round / 2**20:.2f} MiB sent a peer and round, {row.seconds:.0f} s in all"
    )
