"""The line between rank 0 and each other rank of a machine, and the memory that they share.

A Unix socket, not a collective: a rank that waits for a command needs no time limit, and the end of a process is seen
at once, also by a rank that is in a collective. Its name has torchrun's port in it, so ranks find one another only.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

from peer.errors import RunError
from peer.replica.sharded.launch import Rank

RANKS_TIMEOUT = 300.0  # seconds until all ranks are there: they load their libraries first
RANK_NUMBER_TIMEOUT = 10.0  # seconds for the number of a rank
SEND_SECONDS = 60  # seconds for a rank to take a command in; a thread does nothing else
RETRY_SECONDS = 0.05  # seconds
_NUMBER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


class RankLine:
    """Messages, whole, in both directions. One thread may send while another one receives."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self.connection = Connection(link.detach())

    def send(self, message: Any) -> None:
        """Raises ``OSError`` when the other side is gone or takes nothing in."""
        self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """Waits. Raises ``OSError`` or ``EOFError`` when the other side is gone."""
        return pickle.loads(self.connection.recv_bytes())

    def close(self) -> None:
        self.connection.close()


def gather(rank: Rank) -> tuple[int, dict[int, RankLine]]:
    """In rank 0: memory to share, as a file descriptor, and the lines to the other ranks."""
    memory = os.memfd_create("noloco-ranks")  # not /dev/shm, which is small in containers, and gone with the last rank
    lines: dict[int, RankLine] = {}
    until = time.monotonic() + RANKS_TIMEOUT
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(_name(rank))
        server.listen(rank.size)
        while len(lines) < rank.size - 1:
            server.settimeout(max(RETRY_SECONDS, until - time.monotonic()))
            try:
                link, _ = server.accept()
            except TimeoutError:
                raise RunError(
                    f"{len(lines) + 1} of {rank.size} ranks came in {RANKS_TIMEOUT:.0f} s; see their output"
                ) from None
            link.settimeout(RANK_NUMBER_TIMEOUT)
            try:
                number = _NUMBER.unpack(link.recv(_NUMBER.size))[0]
                if not _is_mine(link) or number in lines:
                    raise OSError("not one of us")
                socket.send_fds(link, [b"."], [memory])
            except (OSError, struct.error):
                link.close()
                continue
            lines[number] = RankLine(link)
    return memory, lines


def join(rank: Rank) -> tuple[int, RankLine]:
    """In the other ranks: the shared memory and the line to rank 0."""
    until = time.monotonic() + RANKS_TIMEOUT
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(_name(rank))
            break
        except OSError:
            link.close()
            if time.monotonic() > until:
                raise RunError(
                    f"rank {rank.number}: rank 0 did not come in {RANKS_TIMEOUT:.0f} s; see its output"
                ) from None
            time.sleep(RETRY_SECONDS)
    link.settimeout(RANK_NUMBER_TIMEOUT)
    try:
        link.sendall(_NUMBER.pack(rank.number))
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    except OSError:
        descriptors = []
    if not descriptors or not _is_mine(link):
        raise RunError(f"rank {rank.number}: rank 0 has ended; see its output")
    return descriptors[0], RankLine(link)


def _name(rank: Rank) -> str:
    return f"\0noloco-ranks-{os.getuid()}-{rank.port}"


def _is_mine(link: socket.socket) -> bool:
    """Is the other side a process of the same user? A name like ours has no permissions."""
    said = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.getuid())
