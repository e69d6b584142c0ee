"""``noloco-peer export CKPT [CKPT ...] OUT``: its options. What it does is in work.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        type=Path,
        metavar="CKPT",
        help="a checkpoint (step_NNN), or a peer's folder: its newest one; several are averaged",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights (default fp32)")
    parser.add_argument(
        "--evaluate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute the validation loss (default: when the run's text is on this machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Export, and print what was found on the way."""
    from peer.commands.export.work import export

    for line in export(args.checkpoints, args.out, dtype=args.dtype, evaluate=args.evaluate):
        print(line, flush=True)
    return 0
