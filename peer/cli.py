"""``noloco-peer``: the only file that sees the command line.

noloco-peer train --config configs/demo.yaml --initial-peers ADDRESS
noloco-peer swarm --peers 4 --config configs/demo.yaml
noloco-peer show-config --config configs/demo.yaml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peer import __version__, logs, settings
from peer.config import Config, digest
from peer.errors import RunError, UserError


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done or asked to stop, 1 failed, 2 wrong use or configuration."""
    args = _parser().parse_args(arguments)
    logs.quiet_libraries()
    logs.setup(args.command)
    try:
        code = args.run(args)
    except UserError as error:
        code = _say(error, 2)
    except RunError as error:
        code = _say(error, 1)
    except KeyboardInterrupt:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _say(error: Exception, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="noloco-peer", description="Train a language model together, peer to peer.")
    parser.add_argument("--version", action="version", version=f"noloco-peer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="one peer: join the swarm and train")
    _common(train)
    train.add_argument(
        "--initial-peers",
        nargs="+",
        default=[],
        metavar="ADDR",
        help="addresses that noloco-bootstrap or a peer printed",
    )
    train.add_argument("--stop-with-parent", action="store_true", help=argparse.SUPPRESS)
    train.set_defaults(run=_train)

    swarm = commands.add_parser("swarm", help="a bootstrap node and N peers on this machine, with a live table")
    _common(swarm)
    swarm.add_argument("--peers", type=_positive, default=4, metavar="N", help="number of peers (default 4)")
    swarm.add_argument("--resume", action="store_true", help="go on with the peers that are in run.dir")
    swarm.set_defaults(run=_swarm)

    show = commands.add_parser("show-config", help="print the resolved configuration and its digest")
    _common(show)
    show.set_defaults(run=_show_config)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML file with run: and peer:")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="A.B=C", help="override one key; repeatable"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _train(args: argparse.Namespace) -> int:
    overrides = list(args.overrides)
    if args.initial_peers:
        overrides.append(f"peer.initial_peers=[{', '.join(args.initial_peers)}]")
    config = settings.load(args.config, overrides)
    from peer.progress import Stop
    from peer.signals import Signals, stop_with_parent

    signals = Signals(Stop())
    if args.stop_with_parent:
        stop_with_parent()
    import torch

    from peer.assemble import assembled

    try:
        with assembled(config, signals) as trainer:
            signals.looping = True
            trainer.run()
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        raise RunError(f"{said}; lower peer.micro_batch (now {config.peer.micro_batch or 'the whole batch'})") from None
    return 0


def _swarm(args: argparse.Namespace) -> int:
    from peer.launch.swarm import LocalSwarm

    config = settings.load(args.config, args.overrides)
    return LocalSwarm(config, args.config, args.overrides, peers=args.peers, resume=args.resume).run()


def _show_config(args: argparse.Namespace) -> int:
    config: Config = settings.load(args.config, args.overrides)
    print(f"# digest {digest(config.run)}: equal in the whole swarm for everything under run, paths left out")
    print(settings.dump(config), end="")
    return 0
