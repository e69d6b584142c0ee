"""The line between rank 0 and each other rank of a machine, and the host memory that all ranks map.

The line is a Unix socket, not a collective: a rank can wait for a command without a time limit, and rank 0 sees the end
of a process at once. The socket's name contains torchrun's port, so only the ranks of one peer connect.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from peer.errors import RunError, UserError
from peer.replica.sharded.launch import Rank

WINDOW_ELEMENTS = 16 * 2**20  # elements of fp32: 64 MiB
RANKS_TIMEOUT = 300.0  # seconds until all ranks have connected: they load their libraries first
RANK_NUMBER_TIMEOUT = 10.0  # seconds for the number of a rank
SEND_SECONDS = 60  # seconds for a rank to receive a command; one of its threads does only this
RETRY_SECONDS = 0.05  # seconds
_BYTES = 4
_NUMBER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


class RankLine:
    """Whole messages in both directions. One thread may send while another one receives."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self.connection = Connection(link.detach())

    def send(self, message: Any) -> None:
        """Raises ``OSError`` if the other process has ended or does not receive."""
        self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """Waits without a limit. Raises ``OSError`` or ``EOFError`` if the other process has ended."""
        return pickle.loads(self.connection.recv_bytes())


class SharedMemory:
    """Memory that all ranks map. ``phi``: slow weights of all parameters. ``window``: data in transit. Flat fp32."""

    def __init__(self, descriptor: int, numel: int, window: int) -> None:
        size = _BYTES * (numel + window)
        try:
            os.posix_fallocate(descriptor, 0, size)  # the first rank allocates, for the others this changes nothing
        except OSError as error:
            raise UserError(
                f"{size / 2**30:.2f} GiB for the slow weights cannot be allocated: {error.strerror}; "
                "end other programs, or choose a smaller model"
            ) from None
        whole = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.float32)
        self.whole, self.phi, self.window = whole, whole[:numel], whole[numel:]


def gather(rank: Rank) -> tuple[int, dict[int, RankLine]]:
    """In rank 0: the shared memory, as a file descriptor, and the lines to the other ranks."""
    memory = os.memfd_create("noloco-ranks")  # not /dev/shm, which is small in containers; freed with the last rank
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
                    f"{len(lines) + 1} of {rank.size} ranks connected in {RANKS_TIMEOUT:.0f} s; see their output"
                ) from None
            link.settimeout(RANK_NUMBER_TIMEOUT)
            try:
                number = _NUMBER.unpack(link.recv(_NUMBER.size))[0]
                if not _is_mine(link) or number in lines:
                    raise OSError("not a rank of this peer")
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
                    f"rank {rank.number}: rank 0 did not listen in {RANKS_TIMEOUT:.0f} s; see its output"
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
    """Whether the other process is of the same user: an abstract socket has no permissions."""
    said = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.getuid())
