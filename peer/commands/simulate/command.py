"""``noloco-peer simulate``: its options, and what it prints. simulation.py and network/ do the work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.commands.simulate.options import Method, Options, with_method
from peer.config.schema import Config
from peer.errors import UserError, tell
from peer.process import Signals, cores
from peer.training.run_folder import require_folder, set_aside, write_figures

if TYPE_CHECKING:
    from peer.commands.simulate.network.conditions import Conditions, Figures


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this command, except those that name the configuration."""
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="2 to 64; with --network to 10,000")
    speeds = "speeds of the replicas, repeated"
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0], metavar="S", help=speeds)
    _training_options(parser)
    group = parser.add_argument_group("with --network", "a model of time for up to 10,000 peers; nothing is trained")
    group.add_argument("--network", action="store_true", help="waiting instead of loss: NoLoCo and DiLoCo on a network")
    _network_options(group)


def _training_options(parser: argparse.ArgumentParser) -> None:
    instead = "instead of run.outer, with its defaults; the last three are controls"
    parser.add_argument("--method", type=Method, choices=list(Method), metavar="|".join(Method), help=instead)
    parser.add_argument("--drop", type=float, default=0.0, metavar="SHARE", help="share of the swaps that fail")
    swap = "with run.exchange.overlap: a swap takes K inner steps (default: 8, at most half a phase)"
    parser.add_argument("--swap-steps", type=int, metavar="K", help=swap)
    parser.add_argument("--non-iid", action="store_true", help="every replica reads its own part of the text")
    at_once = "replicas computed at once (default: cores)"
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help=at_once)


def _network_options(group: Any) -> None:
    group.add_argument("--rounds", type=int, default=50, metavar="N", help="of each peer (default 50)")
    group.add_argument("--step-seconds", type=float, default=1.0, metavar="S", help="an inner step, median (default 1)")
    group.add_argument("--step-sigma", type=float, default=0.2, metavar="X", help="its log-normal sigma (default 0.2)")
    group.add_argument("--latency-ms", type=float, default=30.0, metavar="MS", help="one way, median (default 30)")
    group.add_argument("--latency-sigma", type=float, default=0.3, metavar="X", help="log-normal (default 0.3)")
    group.add_argument("--up-mbit", type=float, default=10.0, metavar="R", help="uplink (default 10)")
    group.add_argument("--down-mbit", type=float, default=50.0, metavar="R", help="downlink (default 50)")
    group.add_argument("--loss", type=float, default=0.0, metavar="SHARE", help="share of the swaps that break off")
    group.add_argument("--churn", type=float, default=0.0, metavar="SHARE", help="peers replaced by newcomers a round")


def run(loaded: Config, args: argparse.Namespace) -> int:
    """Simulate, write the figures and print the summary."""
    if loaded.run.inner_time is not None:
        raise UserError("run.inner_time: a simulation has phases of run.inner_steps; leave it out, or set it to null")
    if args.network:
        if given := _given(args, _training_options):
            raise UserError(f"--network models time only: {given} does not fit")
        _network(loaded, args)
        return 0
    if given := _given(args, _network_options):
        raise UserError(f"{given} is for the model of time: add --network, or leave it out")
    from peer.commands.simulate.simulation import Simulation

    config, method = with_method(loaded, args.method)
    options = Options(**{it.name: getattr(args, it.name) for it in fields(Options)} | {"method": method})
    simulation = Simulation(config, options)
    require_folder(config.run.dir)  # an error comes before the work, not after it
    Signals(simulation.stop)
    summary = simulation.run(tell)
    curves, swarm = summary.pop("curves"), summary["swarm"]
    words = (
        f"{config.run.name}: {method}, {args.replicas} replicas, H {config.run.inner_steps}: "
        f"validation loss {swarm['val_loss_mean']:.4f}, {swarm['tokens']:,} tokens, "
        f"{swarm['bytes_sent'] / args.replicas / 2**20:.1f} MiB sent a replica, "
        f"{swarm['tokens'] / swarm['wall_seconds']:.0f} tokens/s computed"
    )
    _save(config.run.dir, {"summary.json": summary, "curves.json": curves}, words)
    return 0


def _save(folder: Path, figures: Mapping[str, object], words: str) -> None:
    """Write the files, with those of an earlier run moved aside, and print the words."""
    try:  # before the words: their reader may have gone
        require_folder(folder)
        set_aside(folder, [*figures])
        for name, value in figures.items():
            write_figures(folder / name, value)
    finally:
        print(words)
    print(f"Figures: {', '.join(str(folder / name) for name in figures)}")


def _given(args: argparse.Namespace, options: Callable[[argparse.ArgumentParser], None]) -> str:
    """The first of these options that does not have its default; empty when all have it."""
    blank = argparse.ArgumentParser()
    options(blank)
    usual = vars(blank.parse_args([]))
    return next((f"--{name.replace('_', '-')}" for name in usual if getattr(args, name) != usual[name]), "")


def _network(config: Config, args: argparse.Namespace) -> None:
    """Model pairs and groups."""
    from peer.commands.simulate.network.conditions import conditions
    from peer.commands.simulate.network.methods import groups, pairs, pairs_by_round, tree_to_pair
    from peer.replica import model

    run = config.run
    it = conditions(run, model.parameters_of(run), args)
    require_folder(run.dir)
    rows = [method(it, run.seed) for method in (pairs, pairs_by_round, groups)]
    tree = tree_to_pair(it, run.seed)
    found = {"conditions": asdict(it), "methods": [asdict(row) for row in rows], "tree_to_pair": tree}
    _save(run.dir, {"network.json": found}, _in_words(it, rows, tree))


def _in_words(it: Conditions, rows: Sequence[Figures], tree: float) -> str:
    lines = [
        f"{row.method}: idle {row.idle_in_all:.1%}, {row.merged_share:.0%} of the rounds merged, "
        f"{row.bytes_per_round / 2**20:.2f} MiB sent a peer and round, {row.seconds:.0f} s, "
        f"{row.end_seconds:.1f} s a peer after its last step"
        for row in rows
    ]
    ratio = rows[2].seconds / (rows[0].seconds + rows[0].end_seconds)
    lines.append(f"DiLoCo takes {ratio:.2f} times as long as NoLoCo for {it.rounds} rounds of {it.peers:,} peers")
    lines.append(f"By latency alone a tree all-reduce takes {tree:.1f} times as long as a pair's average")
    return "\n".join(lines)
