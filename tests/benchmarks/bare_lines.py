"""Bytes over plain TCP, and over TLS, by as many connections as one wants: what a line and two processors carry.

Each connection carries one direction, in a thread that blocks, as those of peer/p2p/bulk do: no parts, no digests.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from peer.p2p.bulk.secure import Credentials

CHUNK = 256 * 1024
HEAD = 17  # a direction, and how many bytes
WAIT = 300.0  # seconds


class PlainLines:
    """A listener that takes or gives as many bytes as it is told. ``port``: where."""

    def __init__(self, server: socket.socket) -> None:
        self._server, self.port = server, server.getsockname()[1]

    @classmethod
    def listening(cls, host: str) -> Self:
        it = cls(socket.create_server((host, 0), backlog=64))
        threading.Thread(target=it._accept, daemon=True).start()
        return it

    @classmethod
    def exchange(cls, host: str, port: int, size: int, connections: int) -> float:
        """Seconds for ``size`` bytes each way, over so many connections each way."""
        began = time.perf_counter()
        with ThreadPoolExecutor(2 * connections) as threads:
            work = [(host, port, way, size // connections) for way in ("take", "give") for _ in range(connections)]
            list(threads.map(lambda it: cls._one(*it), work))
        return time.perf_counter() - began

    @classmethod
    def _one(cls, host: str, port: int, way: str, size: int) -> None:
        with cls.secured(socket.create_connection((host, port), WAIT), server=False) as sock:
            sock.sendall(f"{way} {size:12}".encode())
            (give if way == "take" else take)(sock, size)
            assert way == "give" or sock.recv(1) == b"!"

    @staticmethod
    def secured(sock: socket.socket, *, server: bool) -> socket.socket:
        return sock

    def _accept(self) -> None:
        while True:
            sock, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, plain: socket.socket) -> None:
        plain.settimeout(WAIT)
        with self.secured(plain, server=True) as sock:
            way, size = sock.recv(HEAD, *([] if isinstance(sock, ssl.SSLSocket) else [socket.MSG_WAITALL])).split()
            if way == b"take":
                take(sock, int(size))
                sock.sendall(b"!")
            else:
                give(sock, int(size))
                sock.recv(1)


class TLSLines(PlainLines):
    """The same over TLS 1.3."""

    @staticmethod
    def secured(sock: socket.socket, *, server: bool) -> socket.socket:
        context = _CREDENTIALS.context(_CREDENTIALS.certificate, server=server)
        context.verify_mode = ssl.CERT_NONE  # the two processes have a key each
        return context.wrap_socket(sock, server_side=server)


_CREDENTIALS = Credentials()


def give(sock: socket.socket, size: int) -> None:
    block = memoryview(bytes(CHUNK))
    for start in range(0, size, CHUNK):
        sock.sendall(block[: size - start])


def take(sock: socket.socket, size: int) -> None:
    room = memoryview(bytearray(CHUNK))
    while size:
        got = sock.recv_into(room[:size])
        assert got, "the line has ended early"
        size -= got
