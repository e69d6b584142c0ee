"""``noloco-peer pause`` and ``resume``: a peer of this machine stops training for a while, and keeps its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from peer.errors import RunError, UserError
from peer.training.pausing.requests import Request, ask
from peer.training.run_folder import LOCK, is_used

TAKEN_SECONDS = 10.0  # until a running peer must have taken the request


def run(name: str, run_dir: Path, request: Request, say: Callable[[str], None]) -> None:
    """Ask the peer in the folder ``name``, or in ``run_dir/name``.

    Raises :class:`UserError` when no peer runs there, :class:`RunError` when it does not react.
    """
    folder = _folder(name, run_dir)
    try:
        taken = ask(folder, request, TAKEN_SECONDS)
    except OSError as error:
        raise UserError(f"{folder}: cannot write there: {error.strerror}; be the user whose peer it is") from None
    if not taken:
        raise RunError(
            f"{folder}: its peer does not take requests: it starts, is busy, or is one that cannot pause "
            "(of several ranks, or with a program's own loop); Ctrl+C and the same command resume it too"
        )
    then = "finishes its step and its swap, saves, and frees the GPU" if request == "pause" else "comes back"
    say(f"{folder.name} {then}; see {folder / 'peer.log'}")


def _folder(name: str, run_dir: Path) -> Path:
    for folder in (Path(name), run_dir / name):
        if os.path.lexists(folder / LOCK):
            if not is_used(folder):
                raise UserError(f"{folder}: no peer runs there")
            return folder
    known = sorted(it.parent.name for it in run_dir.glob(f"*/{LOCK}") if is_used(it.parent))
    running = f"; {', '.join(known)} run there" if known else ""
    raise UserError(f"{name}: no such peer, neither as a folder nor in {run_dir} (--dir){running}")
