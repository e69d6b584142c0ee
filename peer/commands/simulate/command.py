"""``noloco-peer simulate``: its options, and what it prints. What it does is in simulation.py and network/."""

from __future__ import annotations

import argparse
import os

from peer.commands.simulate.options import Method, Options, with_method
from peer.config.schema import Config
from peer.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this command, but for those that name the configuration."""
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="2 to 64; with --network to 10,000")
    parser.add_argument(
        "--method",
        type=Method,
        choices=list(Method),
        metavar="|".join(Method),
        help="instead of run.outer, with its defaults; the last three are controls",
    )
    parser.add_argument("--drop", type=float, default=0.0, metavar="SHARE", help="share of the swaps that fail")
    parser.add_argument("--delay", type=int, default=0, metavar="K", help="a result arrives K inner steps late")
    parser.add_argument(
        "--swap-steps", type=int, default=8, metavar="K", help="with run.exchange.overlap: a swap takes K inner steps"
    )
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[1.0], metavar="S", help="speeds of the replicas, repeated"
    )
    parser.add_argument("--non-iid", action="store_true", help="every replica reads its own part of the text")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="replicas computed at once (default: cores)",
    )
    _add_network(parser)


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --network", "a model of time for up to 10,000 peers; nothing is trained")
    group.add_argument("--network", action="store_true", help="waiting instead of loss: NoLoCo and DiLoCo on a network")
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
    if args.network:
        if args.method or args.drop or args.delay or args.non_iid:
            raise UserError("--network models time only: --method, --drop, --delay and --non-iid do not fit")
        from peer.commands.simulate.network import command as network

        print(network.run(loaded, args))
        return 0
    from peer.commands.simulate.simulation import Simulation, save
    from peer.training.run_folder import require_folder

    config, method = with_method(loaded, args.method)
    simulation = Simulation(config, _options(args, method))
    require_folder(config.run.dir)  # before the work, not after it
    summary = simulation.run(lambda line: print(line, flush=True))
    title = f"{config.run.name}: {method}, {args.replicas} replicas, H {config.run.inner_steps}"
    files = save(summary, config.run.dir, title)
    swarm = summary["swarm"]
    print(
        f"{title}: validation loss {swarm['val_loss_mean']:.4f}, {swarm['tokens']:,} tokens, "
        f"{swarm['bytes_sent'] / args.replicas / 2**20:.1f} MiB sent a replica, "
        f"{swarm['tokens'] / swarm['wall_seconds']:.0f} tokens/s computed\nFigures: {', '.join(map(str, files))}"
    )
    return 0


def _options(args: argparse.Namespace, method: Method) -> Options:
    return Options(
        replicas=args.replicas,
        method=method,
        drop=args.drop,
        delay=args.delay,
        swap_steps=args.swap_steps,
        speeds=tuple(args.speeds),
        non_iid=args.non_iid,
        workers=args.workers,
    )
