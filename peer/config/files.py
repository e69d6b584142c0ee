"""Writes a whole file or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from peer.errors import of_disk


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """A new file beside ``path``, which takes its place at the end, when it is on the disk. After an error, a kill or a
    power cut ``path`` is as before, or new.

    ``mode``: its rights before anything is written, less the umask. One thread at a time may replace a ``path``.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # another process may replace it at the same time
    try:
        new.unlink(missing_ok=True)  # a killed process of the same id may have left one that others can read
        new.touch(mode, exist_ok=False)
        yield new
        sync(new)
        new.replace(path)
        sync_entries(path.parent)
    finally:
        with suppress(OSError):  # it has moved, or an error of the disk is already on its way
            new.unlink()


def write_whole(path: Path, text: str, what: str = "", mode: int = 0o644, like: Path | None = None) -> None:
    """Write the whole file or nothing. ``what`` begins the one line of an error: see :func:`peer.errors.of_disk`.

    ``like``: where root writes, the new file belongs to whom that one belongs.
    """
    try:
        with replacing(path, mode) as new:
            new.write_text(text, encoding="utf-8")
            if like is not None and os.geteuid() == 0:
                whose = like.stat()
                os.chown(new, whose.st_uid, whose.st_gid)
    except OSError as error:
        raise of_disk(f"{what}{path}", error) from None


def sync_entries(folder: Path) -> None:
    """As :func:`sync`, of a folder, where its file system can do that and this user may list it."""
    with suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
