"""Shared by the three examples: options, text, and errors in one line."""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer import RunError, UserError
from peer.config.load import overridden
from peer.errors import print_error


def options(description: str) -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--initial-peers", nargs="+", default=None, metavar="ADDR", help="as noloco-bootstrap printed")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="inner steps of the run (default 1000)")
    parser.add_argument("--inner-steps", type=int, default=50, metavar="H", help="between two swaps (default 50)")
    parser.add_argument("--name", default=None, help="of this peer; none: <host name>-<k>")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="CPU threads of torch")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="any other key; repeatable")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed command line; sets torch's threads."""
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for :meth:`peer.OuterLoop.start`."""
    named = {key: getattr(args, key) for key in ("steps", "inner_steps", "initial_peers", "name")}
    return {**named, "settings": dict(overridden(args.set))}


def text(megabytes: float = 1.0) -> Tensor:
    """Sources of the Python standard library, as bytes: ``uint8 [n]``."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"\0".join(file.read_bytes() for file in files)[: int(megabytes * 2**20)]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def windows(data: Tensor, count: int, length: int, draw: torch.Generator) -> Tensor:
    """``count`` random pieces of ``length`` bytes: ``int64 [count, length]``."""
    starts = torch.randint(len(data) - length, (count, 1), generator=draw)
    return data[starts + torch.arange(length)].long()


def run(main: Callable[[], None]) -> None:
    """Run ``main``; errors are one line, and the exit code is 2 for wrong use and 1 otherwise. Ctrl+C is no error."""
    try:
        main()
    except (UserError, RunError) as error:
        sys.exit(print_error(error))
    except KeyboardInterrupt:
        sys.exit(0)
