"""A node of the peer-to-peer network: p2pd and hivemind's DHT node, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID

from peer.errors import UserError, one_line
from peer.logs import get_logger
from peer.p2p.addresses import direct_ways, owner_of, relay_of, tcp_of
from peer.p2p.admission.dht_rules import Authority, keep_revocations
from peer.p2p.admission.gate import ADMISSION_PROTOCOL, Gate
from peer.p2p.bandwidth import Bandwidth
from peer.p2p.budgets import HOPS, RESERVATION_STREAMS, STREAM_OPENINGS, STREAMS, Limit, Places, Spending
from peer.p2p.bulk.offer import BulkPort
from peer.p2p.daemon import Daemon
from peer.p2p.dht.anchors import anchors_of
from peer.p2p.dht.authors import Author
from peer.p2p.dht.join import asked_in_vain, become_client, join_dht, keep_in_touch, notice_of
from peer.p2p.dht.requests import CheckedP2P, Requests, attach
from peer.p2p.dht.whereabouts import KADEMLIA, Whereabouts
from peer.p2p.dial import ATTEMPT_SECONDS, Unreachable, connect_any, dial, disconnect, parsed_id
from peer.p2p.event_loop import LoopThread
from peer.p2p.reachability import circuit_messages, dialback, relay
from peer.p2p.reachability.decide import Reachability, decide
from peer.p2p.reachability.own_addresses import RESERVATION_TIMEOUT, OwnAddresses
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream, StreamLost
from peer.rounds.backoff import Proven

log = get_logger("node")
Handler = Callable[[Stream], Awaitable[None]]

DHT_SHUTDOWN_TIMEOUT = 3.0  # seconds to leave the DHT
RPC_TIMEOUT = 5.0  # seconds for one request to the daemon
OPEN_TIMEOUT = 5.0  # seconds to open a stream
HEARD_SECONDS = 10.0  # without a byte, after which a connection may be dead
START_GRACE = 10.0  # seconds after a deadline of the start, which ends first and says why
DECIDE_TIMEOUT = 60.0  # seconds for the initial peers to say whether they can dial this node


class Node(LoopThread):
    """Start with :meth:`start`, leave with :meth:`stop`; both are safe to call from the main thread only."""

    def __init__(self, settings: NodeSettings, authority: Authority | None = None) -> None:
        super().__init__()
        self._settings, self._authority = settings, authority
        self.invited = authority is not None  # a node of a swarm of invited peers
        self._author: Author | None = authority
        self.proven = Proven()
        self._bulk = BulkPort(self.proven, self.spawn)
        bandwidth = Bandwidth.of(settings.max_upload, settings.max_download)
        self._stream = partial(Stream, bandwidth=bandwidth, bulk_port=self._bulk)
        self._streams: WeakKeyDictionary[Stream, None] = WeakKeyDictionary()  # a set that keeps the order
        self._openings = Spending(STREAM_OPENINGS, self.proven)
        self._places: dict[Limit, Places] = {}
        self._gate = Gate(authority.admission) if authority else None
        self._refused = ""  # an initial peer's objection to our invitation
        self._daemon: Daemon | None = None
        self._p2p: CheckedP2P | None = None
        self._dht: DHTNode | None = None
        self.own = OwnAddresses(self.open, self.visible, settings.initial_peers, self.background, self.proven)

    # -- from the main thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, then join through the first initial peer that answers. Raises one-line errors only."""
        settings, loopback = self._settings, self._settings.host.startswith("127.")
        if settings.reach == "relay" and not settings.initial_peers:
            raise UserError("peer.network.reach is relay: name a relay in peer.initial_peers, a bootstrap node is one")
        reach = Reachability(relayed=settings.reach == "relay", announce=settings.announce)
        self.listen(reach)
        reached = self.connect()
        if settings.reach == "auto" and reached and not loopback and not settings.announce:
            reach = self.call(decide(self.open, self.visible, reached, settings.upnp), DECIDE_TIMEOUT)
            if reach.relayed or reach.announce:
                port = next((it[1] for it in map(tcp_of, self.addresses) if it is not None), settings.port)
                self.call(self.p2p.shutdown(), RPC_TIMEOUT)
                self.kill()
                self.listen(reach, port)
                reached = self.connect()
        self._bulk.start(settings.host, settings.port, settings.bulk_port, listens=not reach.relayed)
        self.call(self.join(reached, client=reach.relayed), settings.join_timeout + START_GRACE)
        self.call(self._offer(reach), RESERVATION_TIMEOUT + START_GRACE)
        if not loopback:
            decides = settings.reach == "auto" and bool(settings.initial_peers) and not settings.announce
            self.keep(partial(self.own.watch, decides, partial(become_client, self.dht)))
        self.keep(partial(keep_in_touch, self.p2p, self.dht, settings.initial_peers, self._given_silence))
        if self._gate is not None:
            look_again = partial(self._gate.look_again, self._streams)
            self.keep(partial(keep_revocations, self.dht, self._gate.admission, look_again))

    def listen(self, reach: Reachability, port: int | None = None) -> None:
        """Start the p2p daemon; ``port`` replaces that of the settings."""
        settings = self._settings
        self._daemon = Daemon(
            identity=settings.identity,
            address=f"/ip4/{settings.host}/tcp/{settings.port if port is None else port}",
            announce=reach.announce,
            upnp=settings.upnp and not reach.relayed and not settings.host.startswith("127."),
            relayed=reach.relayed,
            timeout=settings.start_timeout,
        )
        self.call(self._attach(serves=not reach.relayed), settings.start_timeout)
        self.spawn(self._daemon.watch(self.visible))

    def connect(self) -> list[str]:
        """The initial peers that answer; raises as :func:`connect_any`."""
        settings = self._settings
        limit = settings.join_timeout + ATTEMPT_SECONDS * (len(settings.initial_peers) + 1)  # its last round ends late
        return self.call(connect_any(self.p2p, settings.initial_peers, settings.join_timeout), limit)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs by which others reach this node: :attr:`OwnAddresses.all`."""
        return self.own.all

    @property
    def peer_id(self) -> str:
        """This node's id; empty until it listens."""
        return self.own.peer_id

    @property
    def subkey(self) -> str:
        """The subkey of this peer's record in the directory."""
        return self.peer_id + (self._author.tag if self._author else "")

    @property
    def failure(self) -> str:
        """Why the network has ended; empty while it works."""
        if self._daemon is not None and self._daemon.failure:
            return self._daemon.failure
        if self._authority is not None:
            admission = self._authority.admission
            said = self._refused or admission.objection(admission.own, self.peer_id)
            if said:
                return f"this peer is not admitted any more: {said}"
        ended = not self.alive or (self._p2p is not None and self._p2p.ended)
        return "the network thread has ended" if ended else ""

    def stop(self) -> None:
        """Close everything; leaves no process and no socket file. Stopping twice is fine."""
        self.close(self._goodbye())
        self.kill()

    def kill(self) -> None:
        """End the daemon at once and remove its sockets, without leaving the DHT first."""
        if self._daemon is not None:
            self._daemon.stop()

    # -- on the network thread -----------------------------------------------------------------------

    @property
    def p2p(self) -> P2P:
        """hivemind's client of the daemon; its coroutines run on the network thread."""
        assert self._p2p is not None
        return self._p2p

    @property
    def dht(self) -> DHTNode:
        """hivemind's DHT node; its coroutines run on the network thread."""
        assert self._dht is not None
        return self._dht

    async def open(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        """Open a stream to ``peer_id``. Raises :class:`StreamLost` or ``TimeoutError``."""
        async with asyncio.timeout(OPEN_TIMEOUT):
            if addresses:
                with contextlib.suppress(Unreachable):  # the daemon may know another address of it
                    await dial(self.p2p, peer_id, self.ways(addresses), OPEN_TIMEOUT)
            stream = await self._open_raw(peer_id, protocol)
        if self._gate is not None:
            await self._gate.begin(stream)
        return stream

    def ways(self, addresses: Sequence[str]) -> Sequence[str]:
        """Those of a member's addresses that this node dials."""
        return direct_ways(addresses) if self.own.reach.local else addresses

    async def _open_raw(self, peer_id: str, protocol: str) -> Stream:
        """As :meth:`open` to a peer that is connected, without our certificate."""
        async with asyncio.timeout(OPEN_TIMEOUT):
            try:
                info, reader, writer = await self.p2p.call_binary_stream_handler(parsed_id(peer_id), protocol)
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001 - p2pd reports every failure as a different type
                raise StreamLost(one_line(error)) from None
        return self._tracked(reader, writer, peer_id, info.addr, initiator=True)

    def _tracked(self, reader: Any, writer: Any, remote: str, origin: Any, *, initiator: bool) -> Stream:
        stream = self._stream(reader, writer, remote, initiator, str(origin), hang_up=partial(self.hang_up, remote))
        self._streams[stream] = None
        return stream

    def hears(self, peer_id: str) -> bool:
        """Does something come from a peer these seconds, or through it, or does a transfer run? Then who waits for an
        answer waits behind it.
        """
        own = (it for it in self._streams if peer_id in (it.remote, relay_of(it.origin)) and not it.closed)
        return any(it.silence < HEARD_SECONDS for it in own)

    def hang_up(self, peer_id: str) -> None:
        """Close the connection to a peer from which nothing comes; the next stream to it makes a new one."""
        if not self.hears(peer_id):
            self.background(disconnect(self.p2p, peer_id))

    async def serve(
        self, protocol: str, handler: Handler, *, open_to_all: bool = False, limit: Limit = STREAMS
    ) -> None:
        """Call ``handler`` for every incoming stream of an admitted peer. The handler owns the stream and closes it.

        ``limit``: how many may be open at once, of all protocols with this limit.
        """
        places = self._places.setdefault(limit, Places(limit, self.proven))

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            remote = info.peer_id.to_base58()
            stream = self._tracked(reader, writer, remote, info.addr, initiator=False)
            if not self._openings.spend(remote) or not places.take(remote, lambda: stream.holds_file):
                stream.close()
                return
            try:
                if self._gate is not None and not open_to_all:
                    await self._gate.check(stream)
                    await self._gate.show(stream)
                self.own.called(stream.origin)
                await handler(stream)
            except Exception as error:  # noqa: BLE001 - an outsider's request must not end the listener
                log.debug("stream %s from %s: %s: %s", protocol, stream.remote, type(error).__name__, error)
                stream.close()

        await self.p2p.add_binary_stream_handler(protocol, handle)

    def anchors(self) -> list[PeerID]:
        """See :func:`peer.p2p.dht.anchors.anchors_of`."""
        return anchors_of(self.dht, self._settings.initial_peers, self.proven)

    async def asked_in_vain(self) -> bool:
        """After a search without a result: is a repetition useful? See :func:`peer.p2p.dht.join.asked_in_vain`."""
        return await asked_in_vain(self.p2p, self.dht, self._settings.initial_peers)

    async def visible(self) -> tuple[str, ...]:
        """The daemon's own addresses, with this node's id; a router's port mapping comes some seconds late."""
        async with asyncio.timeout(RPC_TIMEOUT):
            return tuple(str(address) for address in await self.p2p.get_visible_maddrs(latest=True))

    async def _attach(self, *, serves: bool) -> None:
        assert self._daemon is not None
        self._author = self._authority or Author(self._daemon.key)
        requests = Requests(self._author, self.proven)
        self._p2p = await attach(self._daemon.control, self._daemon.sockets, requests)
        await self.own.hear(self.p2p.peer_id.to_base58())
        if serves:
            places = Whereabouts(self.p2p, requests.welcome, self.proven)
            await self.serve(KADEMLIA, places.answer, open_to_all=True)
        if self._gate is not None:
            await self.serve(ADMISSION_PROTOCOL, self._gate.answer, open_to_all=True)

    async def join(self, reached: Sequence[str], *, client: bool) -> None:
        """Join the DHT through nodes that are connected; raises as :func:`join_dht`."""
        assert self._author is not None
        self._dht = await join_dht(self.p2p, reached, self._author, client=client)

    async def _offer(self, reach: Reachability) -> None:
        """Dial back for others, and be a relay; a node that cannot be dialled reserves places at relays instead.

        One that is dialled by private addresses does both: members of other networks may join at any time.
        """
        await self.serve(dialback.DIALBACK_PROTOCOL, dialback.DialBack().answer)
        if not reach.relayed:
            serving = relay.Relay(self._open_raw, self.proven)
            await self.serve(relay.RELAY_PROTOCOL, serving.hold, limit=RESERVATION_STREAMS)
            await self.serve(circuit_messages.HOP, serving.hop, open_to_all=True, limit=HOPS)
        await self.own.use(reach)

    async def _given_silence(self, address: str) -> None:
        """An initial peer is connected and its DHT does not answer."""
        peer_id = owner_of(address)
        if self._authority is not None:
            notice = await notice_of(self.p2p, peer_id, self._authority.admission.own)
            self._refused = notice.objection if notice is not None else ""
        self.hang_up(peer_id)

    async def _goodbye(self) -> None:
        with contextlib.suppress(Exception):  # a daemon that is dead already answers nothing
            async with asyncio.timeout(DHT_SHUTDOWN_TIMEOUT):
                if self._dht is not None:
                    await self._dht.shutdown()
        if self._p2p is not None:
            await self._p2p.shutdown()
