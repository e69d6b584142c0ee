"""This process's place in the peer-to-peer network: p2pd and hivemind's DHT node, on a loop in a thread.

Previous stations: thread.py, daemon.py, dial.py. Next stations: members.py, rendezvous.py, join.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.streams import Stream, StreamLost
from peer.swarm.authority import Authority
from peer.swarm.daemon import Daemon
from peer.swarm.dial import Unreachable, connect_any, dial
from peer.swarm.gate import PROTOCOL as ADMISSION
from peer.swarm.gate import Gate, Notice, knock, why_refused
from peer.swarm.invitation import Certificate
from peer.swarm.revocations import keep_revocations
from peer.swarm.thread import LoopThread

log = get_logger("node")
T = TypeVar("T")
Handler = Callable[[Stream], Awaitable[None]]

CLOCK_TOLERANCE = 3.0  # seconds; hivemind refuses more
GOODBYE_TIMEOUT = 3.0  # seconds for saying goodbye to the DHT
RPC_TIMEOUT = 5.0  # seconds for one request to the daemon
DHT_TIMEOUT = 2.0  # seconds for one DHT request: a frozen member must not hold up a whole search
OPEN_TIMEOUT = 5.0  # seconds to open a stream
REDIAL_SECONDS = 20.0


@dataclass(frozen=True)
class NodeSettings:
    """How this node listens and whom it joins. ``host`` is an IPv4 address."""

    identity: Path | None
    host: str
    port: int
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    upnp: bool = False
    start_timeout: float = 60.0
    join_timeout: float = 60.0


class Node:
    """Start with :meth:`start`, leave with :meth:`stop`; both are safe to call from the main thread only."""

    def __init__(self, settings: NodeSettings, authority: Authority | None = None) -> None:
        self._settings, self._authority = settings, authority
        self._gate = Gate(authority.admission) if authority else None
        self._refused = ""  # what an initial peer says of our invitation
        self._thread = LoopThread()
        self._daemon: Daemon | None = None
        self._p2p: P2P | None = None
        self._dht: DHTNode | None = None
        self.peer_id = ""
        self.addresses: tuple[str, ...] = ()

    # -- from the main thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, then join through the first initial peer that answers. Raises one-line errors only."""
        settings = self._settings
        loopback = settings.host.startswith("127.")
        self._daemon = Daemon(
            identity=settings.identity,
            addresses=[f"/ip4/{settings.host}/tcp/{settings.port}"],
            announce=settings.announce,
            upnp=settings.upnp and not loopback,
            timeout=settings.start_timeout,
        )
        self.call(self._attach(), settings.start_timeout)
        reached = self.call(
            connect_any(self._p2p, settings.initial_peers, settings.join_timeout), settings.join_timeout + 10
        )
        self.call(self._join_dht(reached), settings.join_timeout + 10)
        self.spawn(self._redial())
        if self._authority is not None:
            self.spawn(keep_revocations(self.dht, self._authority.admission))

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run ``work`` on the network thread and wait at most ``timeout`` seconds for it."""
        return self._thread.call(work, timeout)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The network thread's."""
        return self._thread.loop

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until it ends or the node stops."""
        self._thread.spawn(work)

    @property
    def subkey(self) -> str:
        """Under which this peer's record stands in the directory."""
        return self.peer_id + (self._authority.tag if self._authority else "")

    @property
    def failure(self) -> str:
        """Why the network is gone, in words; empty while it works."""
        if self._daemon is not None and not self._daemon.alive:
            return f"the p2p daemon (pid {self._daemon.pid}) has died: {self._daemon.last_words()}"
        if self._authority is not None:
            said = self._refused or self._authority.admission.objection(self._authority.admission.own, self.peer_id)
            if said:
                return f"this peer is not admitted any more: {said}"
        return "" if self._thread.alive else "the network thread has ended"

    def stop(self) -> None:
        """Close everything; leaves no process and no socket file. Stopping twice is fine."""
        self._thread.close(self._goodbye())
        self.kill()

    def kill(self) -> None:
        """End the daemon at once and remove its sockets, without saying goodbye."""
        if self._daemon is not None:
            self._daemon.stop(timeout=3)

    # -- on the network thread -----------------------------------------------------------------------

    @property
    def dht(self) -> DHTNode:
        """hivemind's DHT node; its coroutines run on the network thread."""
        assert self._dht is not None
        return self._dht

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """As :meth:`spawn`, from the network thread itself."""
        self._thread.background(work)

    async def open(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        """Open a stream to ``peer_id``. Raises :class:`StreamLost` or ``TimeoutError``."""
        assert self._p2p is not None
        remote = PeerID.from_base58(peer_id)
        async with asyncio.timeout(OPEN_TIMEOUT):
            try:
                if addresses:
                    with contextlib.suppress(Unreachable):  # it may be known to the network by another address
                        await dial(self._p2p, peer_id, addresses, OPEN_TIMEOUT)
                _, reader, writer = await self._p2p.call_binary_stream_handler(remote, protocol)
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001 - p2pd reports every failure as a different type
                raise StreamLost(str(error) or type(error).__name__) from None
        stream = Stream(reader, writer, remote=peer_id, initiator=True, hang_up=partial(self.hang_up, peer_id))
        if self._gate is not None:
            stream.gate = self._gate.check
            try:
                await self._gate.show(stream)
            except (TimeoutError, StreamLost):
                stream.close()
                raise
        return stream

    def hang_up(self, peer_id: str) -> None:
        """Close the connection to a peer; the next stream to it makes a new one."""
        assert self._p2p is not None
        self.background(_disconnect(self._p2p, peer_id))

    async def count_peers(self) -> int:
        """Peers that this node is connected to. Raises when the daemon does not answer."""
        assert self._p2p is not None
        async with asyncio.timeout(RPC_TIMEOUT):
            try:
                return len(await self._p2p.list_peers())
            except OSError as error:
                raise RunError(f"the p2p daemon does not answer: {error}") from None

    async def serve(self, protocol: str, handler: Handler, *, open_to_all: bool = False) -> None:
        """Call ``handler`` for every incoming stream of one who is admitted, which it then owns and closes."""
        assert self._p2p is not None

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            remote = info.peer_id.to_base58()
            stream = Stream(reader, writer, remote=remote, initiator=False, hang_up=partial(self.hang_up, remote))
            try:
                if self._gate is not None and not open_to_all:
                    await self._gate.check(stream)
                    await self._gate.show(stream)
                await handler(stream)
            except Exception as error:  # noqa: BLE001 - a stranger's request must not end the listener
                log.debug("stream %s from %s: %s: %s", protocol, stream.remote, type(error).__name__, error)
                stream.close()

        await self._p2p.add_binary_stream_handler(protocol, handle)

    async def _attach(self) -> None:
        assert self._daemon is not None
        # hivemind puts its client socket where this private attribute says; ours goes into the daemon's folder
        placed: Any = type("PlacedP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._daemon.sockets}/"})
        self._p2p = await placed.replicate(Multiaddr(self._daemon.control))
        self.peer_id = self._p2p.peer_id.to_base58()
        self.addresses = tuple(str(address) for address in await self._p2p.get_visible_maddrs(latest=True))
        if self._gate is not None:
            await self.serve(ADMISSION, self._gate.answer, open_to_all=True)

    async def _join_dht(self, reached: Sequence[str]) -> None:
        try:
            self._dht = await DHTNode.create(
                self._p2p,
                initial_peers=list(reached),
                wait_timeout=DHT_TIMEOUT,
                backoff_rate=1.0,  # hivemind would look away from a member for twice as long after every failure
                ensure_bootstrap_success=bool(reached),
                authorizer=self._authority.authorizer if self._authority else None,
                record_validator=self._authority.validator if self._authority else None,
            )
        except Exception as error:  # noqa: BLE001 - hivemind's own type is not exported
            refused = await self._why_refused(reached)
            raise UserError(refused or _why_not_joined(str(error), reached)) from None

    async def _why_refused(self, reached: Sequence[str]) -> str:
        """What a node that we have reached says of our invitation; empty when that is not why its DHT is silent."""
        own = self._authority.admission.own if self._authority else None
        for address in reached:
            notice = await self._notice(address.rpartition("/p2p/")[2], own)
            if notice is not None:
                return why_refused(address, notice, own)
        return ""

    async def _redial(self) -> None:
        """Nothing reconnects by itself after an outage: keep the way back to the initial peers and the DHT open."""
        assert self._p2p is not None
        while self._settings.initial_peers:
            await asyncio.sleep(REDIAL_SECONDS)
            for address in self._settings.initial_peers:
                peer_id = address.rpartition("/p2p/")[2]
                with contextlib.suppress(Unreachable, OSError, TimeoutError):
                    await dial(self._p2p, peer_id, [address], RPC_TIMEOUT)
                    async with asyncio.timeout(RPC_TIMEOUT):  # the DHT forgets who did not answer, until a ping
                        if await self.dht.protocol.call_ping(PeerID.from_base58(peer_id)) is None:
                            self._refused = await self._ask_why(peer_id)
                            self.hang_up(peer_id)

    async def _ask_why(self, peer_id: str) -> str:
        """Does a node whose DHT does not answer object to our invitation?"""
        if self._authority is None:
            return ""
        notice = await self._notice(peer_id, self._authority.admission.own)
        return notice.objection if notice is not None else ""

    async def _notice(self, peer_id: str, own: Certificate | None) -> Notice | None:
        """What a node says of a certificate; ``None`` when it does not answer or its swarm is open."""
        assert self._p2p is not None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                remote = PeerID.from_base58(peer_id)
                _, reader, writer = await self._p2p.call_binary_stream_handler(remote, ADMISSION)
                return await knock(Stream(reader, writer, remote=peer_id, initiator=True), own)
        except Exception as error:  # noqa: BLE001 - p2pd reports every failure as a different type
            log.debug("no notice from %s: %s", peer_id, error)
            return None

    async def _goodbye(self) -> None:
        with contextlib.suppress(Exception):  # a daemon that is dead already answers nothing
            async with asyncio.timeout(GOODBYE_TIMEOUT):
                if self._dht is not None:
                    await self._dht.shutdown()
        if self._p2p is not None:
            await self._p2p.shutdown()


async def _disconnect(p2p: Any, peer_id: str) -> None:
    with contextlib.suppress(Exception):  # p2pd reports every failure as a different type, and it is gone then anyway
        async with asyncio.timeout(RPC_TIMEOUT):
            await p2p._client.disconnect(PeerID.from_base58(peer_id))


def _why_not_joined(error: str, reached: Sequence[str]) -> str:
    clocks = re.search(r"local: ([\d.]+), peer: ([\d.]+)", error)
    if clocks:
        ahead = float(clocks[1]) - float(clocks[2])
        return (
            f"this machine's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {reached[0]}; "
            f"at most {CLOCK_TOLERANCE:.0f} s are allowed. Set it by NTP, for example: timedatectl set-ntp true"
        )
    return f"joined {reached[0]} but its DHT does not answer: {error}"
