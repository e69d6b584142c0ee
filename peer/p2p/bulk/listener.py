"""Both ends of a connection: the port, and the dialler. An outsider gets a little time and nothing else, and no thread.

    dialler: the transfer's id; TLS with both certificates; token, role      listener: accepted

An id that belongs to no transfer ends it before TLS begins. The id is the hash of the token, which goes inside TLS only
and counts for one transfer and one certificate. Half-open connections are few: the oldest one of an address makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial

from peer.errors import UserError
from peer.logs import get_logger
from peer.p2p.addresses import listening
from peer.p2p.budgets import HALF_OPEN
from peer.p2p.bulk.secure import handshake, read, ready, tune
from peer.p2p.bulk.transfer import ACCEPTED, ID_BYTES, TOKEN_BYTES, BulkTransfer, Role

log = get_logger("bulk")

ADMIT_SECONDS = 2.0  # from the first packet to the token
ACCEPT_PAUSE = 0.1  # seconds after a failure of this machine: too many open files
Find = Callable[[bytes], BulkTransfer | None]  # the transfer with an id


class BulkListener:
    """Belongs to the network thread but for :meth:`listen`."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._server: socket.socket | None = None
        self._half_open: dict[asyncio.Task[None], str] = {}  # by age; IP addresses

    def listen(self, host: str, port: int) -> int:
        """Take the port; 0 for any free one. Returns it. Raises :class:`UserError`."""
        try:
            server = listening(host, port)
        except OSError as error:
            raise UserError(
                f"port occupied: peer.network.bulk_port {host}:{port}: {error.strerror}; choose another one, or off"
            ) from None
        server.setblocking(False)
        self._server = server
        return int(server.getsockname()[1])

    async def run(self) -> None:
        """Accept until it is cancelled; then the port is free."""
        assert self._server is not None
        with self._server as server:
            try:
                while True:
                    await self._accept(server)
            except asyncio.CancelledError:
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)  # a forked process (a data loader) has a copy of it
                raise

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, (ip, *_) = await loop.sock_accept(server)
        except OSError as error:
            log.debug("cannot accept: %s", error)
            await asyncio.sleep(ACCEPT_PAUSE)
            return
        self._make_room(ip)
        task = loop.create_task(self._admit(sock))
        self._half_open[task] = ip
        task.add_done_callback(partial(self._ended, sock))

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        del self._half_open[task]
        sock.close()  # TLS has taken what is in use

    def _make_room(self, ip: str) -> None:
        waiting = {task: it for task, it in self._half_open.items() if not task.cancelling()}
        if Counter(waiting.values())[ip] >= HALF_OPEN.each:
            next(task for task, it in waiting.items() if it == ip).cancel()
        elif len(waiting) >= HALF_OPEN.all:
            next(iter(waiting)).cancel()

    async def _admit(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # also TimeoutError; of what is no certificate
            async with asyncio.timeout(ADMIT_SECONDS):
                transfer = self._find(await read(sock, ID_BYTES))
                if transfer is None or transfer.closed:
                    return
                theirs = await transfer.partner()
                tune(sock)
                secure = await handshake(sock, transfer.context(server=True), theirs, server=True)
                try:
                    role = await _role(secure, transfer)
                except BaseException:
                    secure.close()
                    raise
                transfer.take(secure, role)


async def _role(secure: ssl.SSLSocket, transfer: BulkTransfer) -> Role:
    """What this side does on a connection of ``transfer``. Raises ``OSError`` when it is none."""
    said = await read(secure, TOKEN_BYTES + 1)
    if not hmac.compare_digest(said[:-1], transfer.token) or said[-1] not in tuple(Role):
        raise ConnectionRefusedError("it has another token")
    await ready(secure, partial(secure.send, ACCEPTED))
    return Role.SERVE if said[-1] == Role.PULL else Role.PULL


async def connect(host: str, port: int, transfer: BulkTransfer, role: Role) -> ssl.SSLSocket:
    """A connection on which this side has ``role``. Raises ``OSError``. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    try:
        sock.setblocking(False)
        tune(sock)
        await loop.sock_connect(sock, (host, port))
        await loop.sock_sendall(sock, transfer.id)
        theirs = await transfer.partner()
        sock = secure = await handshake(sock, transfer.context(server=False), theirs, server=False)
        await ready(secure, partial(secure.send, transfer.token + bytes([role])))
        if await read(secure, len(ACCEPTED)) != ACCEPTED:
            raise ConnectionRefusedError("it does not accept the token")
    except BaseException:
        sock.close()
        raise
    return secure
