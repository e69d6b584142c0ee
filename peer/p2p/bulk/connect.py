"""The dialler's side of a connection (listener.py)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial

from peer.p2p.bulk.secure import handshake, read, ready, tune
from peer.p2p.bulk.transfer import ACCEPTED, BulkTransfer, Role


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
        secure = await handshake(sock, transfer.context(server=False), theirs, server=False)
    except BaseException:
        sock.close()
        raise
    try:
        await ready(secure, partial(secure.send, transfer.token + bytes([role])))
        if await read(secure, len(ACCEPTED)) != ACCEPTED:
            raise ConnectionRefusedError("it does not accept the token")
    except BaseException:
        secure.close()
        raise
    return secure
