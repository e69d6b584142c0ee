"""One TLS connection in the hands of one thread, which blocks: that takes half the processor time of asyncio."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from peer.p2p.bandwidth import Bandwidth

BULK_CHUNK = 256 * 1024  # bytes for one deadline


class BulkConnection:
    """``sent`` and ``received``: get the bytes of each chunk of a part. Raises ``OSError`` or ``TimeoutError``."""

    def __init__(
        self, sock: ssl.SSLSocket, line: Bandwidth, sent: Callable[[int], None], received: Callable[[int], None]
    ) -> None:
        self._sock, self._line, self._sent, self._received = sock, line, sent, received

    def read(self, count: int, timeout: float) -> bytes:
        """Exactly ``count`` bytes; ``timeout`` bounds each wait for more, in seconds."""
        data = bytearray(count)
        self._fill(memoryview(data), timeout)
        return bytes(data)

    def read_part(self, room: memoryview, timeout: float) -> None:
        """Fill ``room`` within the limit of downloads."""
        for piece in self._line.down.pieces(room):
            self._line.down.take_in_thread(len(piece))
            self._fill(piece, timeout, self._received)

    def write(self, data: bytes, timeout: float) -> None:
        """Send ``data``; ``timeout`` bounds each wait for room, in seconds."""
        self._sock.settimeout(timeout)
        self._sock.sendall(data)

    def write_part(self, part: bytes, timeout: float) -> None:
        """Send ``part`` within the limit of uploads."""
        self._sock.settimeout(timeout)
        for piece in self._line.up.pieces(memoryview(part)):
            self._line.up.take_in_thread(len(piece))
            for start in range(0, len(piece), BULK_CHUNK):
                chunk = piece[start : start + BULK_CHUNK]
                self._sock.sendall(chunk)
                self._sent(len(chunk))

    def shut(self) -> None:
        """From any thread: whoever waits for the socket does so no longer."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # ssl's own one would take its session from the thread
        except OSError:
            return

    def close(self) -> None:
        """By its thread, at the end."""
        self._sock.close()

    def _fill(self, room: memoryview, timeout: float, count: Callable[[int], None] = lambda _: None) -> None:
        self._sock.settimeout(timeout)
        filled = 0
        while filled < len(room):
            size = self._sock.recv_into(room[filled:])
            if not size:
                raise ConnectionResetError("the other side has closed it")
            filled += size
            count(size)
