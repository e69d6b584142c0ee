"""``--addresses-file``: the addresses by which peers join this node, one a line, for as long as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peer.config.files import write_whole
from peer.errors import RunError, UserError
from peer.logs import get_logger

log = get_logger("bootstrap")


class AddressesFile:
    """``path``: none without the option. ``addresses``: those that were printed.

    The node serves without the file too: an error of the disk is logged once, and each later call tries again.
    """

    def __init__(self, path: Path | None, addresses: Sequence[str]) -> None:
        self._path, self._told = path, tuple(addresses)
        self._written: set[str] = set()
        self._failing = False

    def follow(self, addresses: Sequence[str]) -> None:
        """Say and write those that the node has now, if they are others."""
        now = set(addresses)  # the daemon names them in any order
        if now and now != set(self._told):  # none: while they are found out
            self._told = tuple(addresses)
            log.info("peers join at: %s", ", ".join(addresses))
        if self._path is None or self._written == set(self._told):
            return
        try:
            write_whole(self._path, "".join(f"{address}\n" for address in self._told), "--addresses-file ")
        except (UserError, RunError) as error:
            if not self._failing:
                log.warning("the addresses are not written: %s", error)
            self._failing = True
        else:
            self._written, self._failing = set(self._told), False
