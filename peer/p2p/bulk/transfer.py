"""The direct connections of one transfer between two members: each serves one direction, in a thread of its own."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import math
import secrets
import ssl
import threading
from collections.abc import AsyncIterator, Iterable
from functools import partial

from peer import clock
from peer.logs import get_logger
from peer.p2p.bandwidth import Bandwidth
from peer.p2p.bulk.connection import BulkConnection
from peer.p2p.bulk.growth import MOST_CONNECTIONS
from peer.p2p.bulk.handover import Handover
from peer.p2p.bulk.receiving import IncomingParts
from peer.p2p.bulk.secure import Credentials
from peer.p2p.bulk.sending import OutgoingParts
from peer.p2p.stream import BadMessage, StreamLost

log = get_logger("bulk")

TOKEN_BYTES, ID_BYTES = 16, 16
ACCEPTED = b"+"
MOST_OPENED = 64  # connections of a transfer, with those that were lost


class Role(enum.IntEnum):
    """What one side does on a connection."""

    PULL = 1  # it asks for parts
    SERVE = 2  # it sends those that it is asked for


class BulkTransfer:
    """Belongs to the network thread, but for what connections' threads call.

    ``payloads``: of each direction, one after the other; ``most``: connections of each.
    ``token``: shows that a connection belongs to it; the dialler has the listener's one.
    ``sent``, ``received``: bytes of parts, with those that a lost connection carried in vain.
    """

    def __init__(
        self, credentials: Credentials, line: Bandwidth, payloads: int = 1, most: int = MOST_CONNECTIONS
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name(secrets.token_bytes(TOKEN_BYTES))
        self.incoming, self.outgoing = IncomingParts(loop, payloads), OutgoingParts(loop, payloads)
        self.most = most
        self.sent = self.received = 0
        self.heard = -math.inf  # when something was received last
        self.closed = False
        self.ready = False  # both sides use it
        self._contexts: dict[bool, ssl.SSLContext] = {}  # not functools.cache: it would make a cycle
        self._credentials, self._line = credentials, line
        self._certificate, self._known = b"", asyncio.Event()
        self._counting = threading.Lock()
        self._open: dict[BulkConnection, Role] = {}
        self.opened = 0  # connections, with those that are lost
        self._last_loss: Exception = ConnectionResetError("none was made")
        self.last_ended = clock.monotonic()  # when a connection ended last; before, when it began

    # -- before its connections

    def name(self, token: bytes) -> None:
        """``id``, which everybody may read, does not tell ``token``."""
        self.token, self.id = token, hashlib.sha256(token).digest()[:ID_BYTES]

    def expect(self, certificate: bytes) -> None:
        """The other side's certificate (DER) has come."""
        self._certificate = certificate
        self._known.set()

    async def partner(self) -> bytes:
        """The other side's certificate, once it has come. The caller sets the deadline."""
        await self._known.wait()
        return self._certificate

    def context(self, *, server: bool) -> ssl.SSLContext:
        """For its connections; made once."""
        if server not in self._contexts:
            self._contexts[server] = self._credentials.context(self._certificate, server=server)
        return self._contexts[server]

    # -- connections

    def take(self, sock: ssl.SSLSocket, role: Role) -> None:
        """Use a connection on which this side has ``role``; it is closed when there were too many, or it is over."""
        if not self.takes_more or self.count(role) >= self.most:
            sock.close()
            return
        self.opened += 1
        connection = BulkConnection(sock, self._line, self._count_sent, self._count_received)
        with self._counting:
            self._open[connection] = role
        clock.begin_thread("bulk", partial(self._run, connection, role))

    @property
    def takes_more(self) -> bool:
        """It goes on, and has had fewer connections than it may ever have."""
        return not self.closed and self.opened < MOST_OPENED

    def count(self, role: Role) -> int:
        """Connections on which this side has ``role``."""
        with self._counting:
            return list(self._open.values()).count(role)

    def side(self, role: Role) -> Handover:
        """The direction that connections of ``role`` serve."""
        return self.incoming if role is Role.PULL else self.outgoing

    def _run(self, connection: BulkConnection, role: Role) -> None:
        try:
            work = self.incoming.pull if role is Role.PULL else self.outgoing.serve
            work(connection)
        except (OSError, StreamLost, BadMessage) as error:
            self._last_loss = error
            if not self.closed:
                log.debug("a direct connection is lost: %s: %s", type(error).__name__, error)
        finally:
            with self._counting:
                self._open.pop(connection, None)
                self.last_ended = clock.monotonic()
            connection.close()

    def _count_sent(self, size: int) -> None:
        with self._counting:
            self.sent += size

    def _count_received(self, size: int) -> None:
        with self._counting:
            self.received += size
            self.heard = clock.monotonic()

    # -- parts

    async def send(self, data: AsyncIterator[bytes], stall: float) -> None:
        """As :meth:`OutgoingParts.send`."""
        await self.outgoing.send(data, stall)

    def receive(self, rooms: Iterable[memoryview], stall: float) -> AsyncIterator[tuple[int, memoryview, bytes]]:
        """As :meth:`IncomingParts.receive`."""
        return self.incoming.receive(rooms, stall)

    def lose(self, reason: Exception | None = None) -> None:
        """No connection is left, and there will be none: whoever waits is told why."""
        error = reason or self._last_loss
        if not isinstance(error, TimeoutError):
            error = StreamLost(f"its direct connections are lost: {error}")
        for side in (self.incoming, self.outgoing):
            side.fail(error)

    def close(self) -> None:
        """End all connections and whatever waits for them. Twice is fine."""
        self.closed = True
        self.lose(StreamLost("this side has closed it"))
        self.incoming.forget()
        self.outgoing.forget()
        with self._counting:
            connections = list(self._open)
        for connection in connections:
            connection.shut()
