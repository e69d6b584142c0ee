"""``noloco-peer``: the options of all commands.

noloco-peer train --config configs/demo.yaml --initial-peers ADDRESS
noloco-peer join ADDRESS
noloco-peer swarm --peers 4 --config configs/demo.yaml
noloco-peer simulate --replicas 8 --config configs/demo.yaml
noloco-peer tokenize books/*.jsonl.gz tokens --tokenizer gpt2
noloco-peer check --config configs/demo.yaml --initial-peers ADDRESS
noloco-peer status ADDRESS
noloco-peer pause peer-1
noloco-peer export runs/peer-1 runs/peer-2 my-model --push OWNER/NAME
noloco-peer show-config --config configs/demo.yaml
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from peer import __version__
from peer.commands.arguments import bitrate, positive, repository
from peer.commands.simulate import command as simulation
from peer.config import load
from peer.config.digest import digest
from peer.config.schema import Config
from peer.errors import RunError, UserError, print_error, run_command
from peer.logs import printable
from peer.process import Signals, Stop, begin_command, keep_freed_memory, stop_with_parent
from peer.replica.sharded import launch


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit."""
    begin_command()
    args = _parser().parse_args(arguments)
    sys.exit(run_command(args.command, partial(args.run, args)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="noloco-peer", description="Train a language model together, peer to peer.")
    parser.add_argument("--version", action="version", version=f"noloco-peer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="one peer: join the swarm and train")
    _common(train)
    _initial_peers(train)
    train.add_argument("--stop-with-parent", action="store_true", help=argparse.SUPPRESS)
    train.set_defaults(run=_train, load=_loaded, begun=lambda *_: None)

    join = commands.add_parser("join", help="one peer: train what a swarm trains, without its configuration file")
    _join_options(join)

    swarm = commands.add_parser("swarm", help="a bootstrap node and N peers on this machine, with a live table")
    _common(swarm)
    swarm.add_argument("--peers", type=positive, default=4, metavar="N", help="number of peers (default 4)")
    swarm.add_argument("--resume", action="store_true", help="resume the peers in run.dir")
    swarm.set_defaults(run=_swarm)

    simulate = commands.add_parser("simulate", help="many replicas in one process: the effect of a method on the loss")
    _common(simulate)
    simulation.add_options(simulate)
    simulate.set_defaults(run=lambda args: simulation.run(_loaded(args), args))

    tokenize = commands.add_parser("tokenize", help="text or JSON Lines into Parquet with token ids")
    tokenize.add_argument("sources", nargs="+", metavar="SOURCE", help="files: text, .jsonl, .jsonl.gz, .parquet")
    tokenize.add_argument("out", type=Path, metavar="OUT", help="folder for one Parquet file a source")
    tokenize.add_argument("--tokenizer", default="bytes", metavar="NAME", help="bytes, a Hugging Face name, or a path")
    tokenize.add_argument("--end", metavar="TOKEN", help="the token that ends a document, if not the tokenizer's own")
    tokenize.add_argument("--column", default="text", metavar="NAME", help="of JSON Lines and Parquet (default text)")
    tokenize.set_defaults(run=_tokenize)
    check = commands.add_parser("check", help="can this machine join and be reached? One finding a line, with advice")
    _common(check, file_needed=False)
    check.add_argument("--own-loop", action="store_true", help="check a program with peer.OuterLoop; needs no file")
    _initial_peers(check)
    check.add_argument("--ranks", type=positive, default=1, metavar="N", help="GPUs of the peer, as for torchrun")
    check.add_argument("--speed", action="store_true", help="measure the line to members: does a swap fit?")
    check.set_defaults(run=_check)

    status = commands.add_parser("status", help="the members of a swarm, as a live table")
    status.add_argument("addresses", nargs="*", metavar="ADDRESS", help="any of the swarm's addresses")
    status.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDR", help="the same, as for train")
    status.add_argument("--invitation", type=Path, metavar="FILE", help="an invitation, if the swarm requires one")
    status.set_defaults(run=_status)

    _requests(commands)
    _add_export(commands.add_parser("export", help="checkpoints into a Hugging Face folder; several are averaged"))

    show = commands.add_parser("show-config", help="print the resolved configuration and its digest")
    _common(show)
    show.set_defaults(run=_show_config)
    return parser


def _add_export(export: argparse.ArgumentParser) -> None:
    found = "a checkpoint (step_NNN), or a peer's folder: its newest one; several are averaged"
    export.add_argument("checkpoints", nargs="+", type=Path, metavar="CKPT", help=found)
    export.add_argument("out", type=Path, metavar="OUT", help="the new folder")
    export.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights (default fp32)")
    wish = "compute the validation loss (default: when the run's text is on this machine)"
    export.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=None, help=wish)
    export.add_argument("--push", type=repository, metavar="OWNER/NAME", help="push the folder to the Hugging Face hub")
    export.add_argument("--public", action="store_true", help="make a new repository of the hub for all to see")
    export.add_argument("--max-upload", type=bitrate, metavar="RATE", help="limit of the push, such as 20mbit")
    export.add_argument("--stop-with-parent", action="store_true", help=argparse.SUPPRESS)
    export.set_defaults(run=_export)


def _join_options(join: argparse.ArgumentParser) -> None:
    join.add_argument("addresses", nargs="*", metavar="ADDRESS", help="any of the swarm's addresses")
    join.add_argument("--run", dest="run_name", metavar="NAME", help="the run, if several are trained there")
    join.add_argument("--digest", help="the configuration to take (default: that of most members)")
    join.add_argument("--invitation", type=Path, metavar="FILE", help="an invitation, if the swarm requires one")
    _common(join, file_needed=False)
    join.set_defaults(run=_train, load=_joining, begun=_keep)


def _requests(commands: Any) -> None:
    """``pause`` and ``resume``."""
    for word, what in (("pause", "a peer of this machine frees its GPU and keeps its place"), ("resume", "it goes on")):
        command = commands.add_parser(word, help=what)
        command.add_argument("name", metavar="NAME", help="the peer's name, or its folder")
        command.add_argument("--dir", type=Path, help="run.dir of the peer (default: NOLOCO_RUN_DIR, or runs)")
        command.set_defaults(run=_pause)


def _common(parser: argparse.ArgumentParser, *, file_needed: bool = True) -> None:
    files = "YAML files with run: and peer:; a later one's keys win"
    parser.add_argument("--config", type=Path, nargs="+", required=file_needed, metavar="FILE", help=files)
    key = "override one key; repeatable"
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C", help=key)


def _initial_peers(parser: argparse.ArgumentParser) -> None:
    printed = "addresses that noloco-bootstrap or a peer printed"
    parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDR", help=printed)


def _loaded(args: argparse.Namespace) -> Config:
    return load.load(args.config, _overrides(args))


def _joining(args: argparse.Namespace) -> Config:
    from peer.commands.join.configuration import JoinOptions, joining

    rank = launch.of(os.environ)
    options = JoinOptions(
        addresses=args.addresses,
        files=args.config or [],
        overrides=args.overrides,
        run=args.run_name,
        digest=args.digest,
        invitation=args.invitation,
        ranks=1 if rank is None else rank.size,
    )
    return joining(options, partial(print, flush=True))


def _keep(config: Config, peer_name: str) -> None:
    from peer.commands.join.kept import keep

    keep(config, peer_name)


def _overrides(args: argparse.Namespace) -> list[str]:
    peers = getattr(args, "initial_peers", [])
    return [*args.overrides, f"peer.initial_peers=[{', '.join(peers)}]"] if peers else args.overrides


def _train(args: argparse.Namespace) -> int:
    keep_freed_memory()
    rank = launch.of(os.environ)
    if rank is not None and rank.number:
        from peer.replica.sharded import worker

        return worker.run(rank)
    signals = Signals(Stop())
    config: Config | None = None
    if rank is None:  # before torch is there: a mistake is told at once
        config = args.load(args)
    if getattr(args, "stop_with_parent", False):
        stop_with_parent()
    from peer.device.memory import is_out_of_memory
    from peer.replica.inner_loop import out_of_memory
    from peer.replica.sharded.ranks import leading
    from peer.training.assemble import assembled

    def give_up(why: str) -> None:
        if why:
            print_error(RunError(why))
        signals.emergency()
        os._exit(1)

    try:
        with leading(rank, give_up) as ranks:  # they connect, then wait without a limit
            config = config or args.load(args)
            with assembled(config, signals, ranks) as trainer:
                signals.begin_loop()
                args.begun(config, trainer.member.resources.folder.name)
                trainer.run()
    except RuntimeError as error:
        if config is None or not is_out_of_memory(error):
            raise
        raise RunError(out_of_memory(error, config, rank.size if rank else 1)) from None
    return 0


def _swarm(args: argparse.Namespace) -> int:
    from peer.commands.local_swarm.swarm import LocalSwarm

    return LocalSwarm(_loaded(args), args.config, args.overrides, peers=args.peers, resume=args.resume).run()


def _tokenize(args: argparse.Namespace) -> int:
    from peer.commands import tokenize as tokenizing

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # all cores: no training at the same time
    tokenizing.run(
        args.sources,
        args.out,
        args.tokenizer,
        end=args.end,
        column=args.column,
        say=lambda line: print(printable(line), flush=True),  # a name of a file may be no UTF-8
    )
    return 0


def _status(args: argparse.Namespace) -> int:
    from peer.commands import status

    known = dict(load.from_environment(os.environ))
    invitation = args.invitation or known.get("peer.invitation")
    addresses = [*args.addresses, *args.initial_peers] or known.get("peer.initial_peers", [])
    return status.run(addresses, invitation and Path(invitation))


def _pause(args: argparse.Namespace) -> int:
    from peer.commands import pause

    run_dir = args.dir or Path(dict(load.from_environment(os.environ)).get("run.dir", "runs"))
    pause.run(args.name, run_dir, args.command, partial(print, flush=True))
    return 0


def _check(args: argparse.Namespace) -> int:
    from peer.api.config import OwnConfig
    from peer.commands.check.runner import run

    config: Config | OwnConfig
    if args.own_loop and args.ranks > 1:
        raise UserError("check: --ranks is for a peer of several GPUs; a program with its own loop is one process")
    if args.own_loop:
        config = load.resolve(OwnConfig, args.config, load.overridden(_overrides(args)))
    elif args.config is None:
        raise UserError("check: --config is needed, or --own-loop for a program with peer.OuterLoop")
    else:
        from peer.replica import model_source

        config = model_source.pinned(_loaded(args))
    return run(config, partial(print, flush=True), args.ranks, speed=args.speed)


def _export(args: argparse.Namespace) -> int:
    from peer.commands.export.work import Target, export

    if args.stop_with_parent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # KeyboardInterrupt would wait for the upload of a file
        stop_with_parent()
    target = Target(args.push, private=not args.public, rate=args.max_upload) if args.push else None
    for line in export(args.checkpoints, args.out, dtype=args.dtype, evaluate=args.evaluate, push_to=target):
        print(line, flush=True)
    return 0


def _show_config(args: argparse.Namespace) -> int:
    from peer.replica import model, model_source

    config: Config = model_source.pinned(_loaded(args))
    outline = model.outline(config.run)
    parameters, embeddings = model.parameter_count(outline), model.embedding_count(outline)
    print(f"# digest {digest(config.run)}: equal in the whole swarm for everything under run, paths left out")
    print(f"# {parameters:,} parameters, {embeddings:,} of them embeddings")
    print(load.dump(config), end="")
    return 0
