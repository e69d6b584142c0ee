"""A peer's name and its folder ``<run.dir>/<peer name>``, locked while the peer runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from peer.errors import RunError, UserError, of_disk

LOCK = ".lock"  # in the folder


class RunFolder:
    """The claimed folder. The lock ends with the process, also after a kill."""

    def __init__(self, name: str, path: Path, lock: int) -> None:
        self.name, self.path, self._lock, self._process = name, path, lock, os.getpid()

    def release(self) -> None:
        """Let another process use the folder, though a forked one (a data loader) has a copy of the descriptor."""
        if os.getpid() == self._process:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


def claim(run_dir: Path, name: str | None) -> RunFolder:
    """Claim the folder of ``name``, or with ``None`` the first free ``<host name>-<k>``: the same folder after a
    restart, another one for a second peer on the machine.
    """
    for candidate in [name] if name else _names():
        folder = run_dir / candidate
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise of_disk(f"run.dir: cannot write to {folder}", error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise UserError(f"run.dir: cannot lock {folder}: {error.strerror}; choose a local disk") from None
            if name:
                raise UserError(f"{folder} is used by a running peer; choose another peer.name or run.dir") from None
            continue
        return RunFolder(candidate, folder, lock)
    raise AssertionError("unreachable: the names do not end")


def next_name(run_dir: Path) -> str:
    """The one that ``claim`` without a name would take now. Creates no file."""
    return next(name for name in _names() if not is_used(run_dir / name))


def is_used(folder: Path) -> bool:
    """Does a peer run in this folder? Creates no file."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def require_folder(folder: Path) -> None:
    """Create ``folder`` if it is missing. Raises :class:`UserError` when it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"run.dir: cannot write to {folder}: Permission denied")


def set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Move the files and folders ``names`` of an earlier run to ``<folder>/before-<time>``; returns that folder, or
    ``None`` if there are none.

    Raises :class:`UserError` when a peer runs in one of them, :class:`RunError` when they cannot be moved.
    """
    used = [folder / name for name in names if (folder / name).exists()]
    if not used:
        return None
    for path in used:
        if path.is_dir():
            claim(folder, path.name).release()  # fails if a peer runs there
    aside = folder / time.strftime("before-%Y%m%d-%H%M%S")
    try:
        aside.mkdir()
        for path in used:
            path.rename(aside / path.name)
    except OSError as error:
        raise RunError(f"cannot move the earlier run to {aside}: {error.strerror}") from None
    return aside


def write_figures(path: Path, figures: object) -> None:
    """As JSON. Raises :class:`RunError` when they cannot be written."""
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write the figures to {path}: {error.strerror}") from None


def _names() -> Iterator[str]:
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")[:40] or "peer"
    return (f"{host}-{k}" for k in count(1))
