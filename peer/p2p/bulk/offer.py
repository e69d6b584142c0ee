"""Two members agree on direct connections for the parts of one transfer. Offered, never required.

    both: an offer, with the first messages of the transfer     dialler: BulkReady, once it is connected or has failed

The initiator dials, if it wants to and the other side listens; else the other way round; else, and whenever dialling
fails, parts go over the p2p stream. Only the address from which the other side's p2p connection comes is dialled, so a
member cannot make another one dial a third party. Who could not be dialled is not dialled again for a while.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from pydantic import Field

from peer import clock
from peer.errors import UserError
from peer.logs import fields, get_logger
from peer.p2p.addresses import tcp_of
from peer.p2p.budgets import BULK_TRANSFERS, Places
from peer.p2p.bulk.growth import FIRST_CONNECTIONS, MOST_CONNECTIONS, Growth
from peer.p2p.bulk.listener import BulkListener, connect
from peer.p2p.bulk.secure import Credentials
from peer.p2p.bulk.transfer import TOKEN_BYTES, BulkTransfer, Role
from peer.p2p.reachability.cloud import find
from peer.p2p.stream import BadMessage, Message, Stream, StreamLost
from peer.rounds.backoff import PeerBackoff, Proven
from peer.rounds.types import Newest

log = get_logger("bulk")

LEAST_BULK = 4 * 2**20  # bytes of a transfer: for less, connections are not worth their round trips
DIAL_SECONDS = 2.0  # for one connection: TCP, TLS and token
READY_TIMEOUT = 2 * DIAL_SECONDS + 3.0  # seconds for the dialler's message
TRANSFER_LOOK = 1.0  # seconds between two looks of a listener whether connections are left
GONE_SECONDS = 5.0  # without connections of a role, after which a listener gives up
UNREACHABLE_SECONDS = 1800.0  # for which a member is not dialled again
USEFUL_SECONDS = 1800.0  # for which as many connections to a member are made as were useful
REMEMBERED_MEMBERS = 1024
TRIPS_TO_CONNECT = 4  # TCP, TLS, token


class BulkOffer(Message):
    """``certificate``: DER in base64. ``token``: in hex, for connections to me. ``port``: mine, or 0."""

    certificate: Annotated[str, Field(min_length=4, max_length=1024, pattern="^[A-Za-z0-9+/=]+$")]
    token: Annotated[str, Field(min_length=2 * TOKEN_BYTES, max_length=2 * TOKEN_BYTES, pattern="^[0-9a-f]+$")]
    port: Annotated[int, Field(ge=0, le=65535)]
    dials: bool  # I would dial you


class BulkReady(Message):
    """``ready``: parts go over the connections that I have made; else over this stream."""

    kind: Literal["bulk_ready"] = "bulk_ready"
    ready: bool


class BulkPort:
    """Direct connections of a node. Belongs to the network thread but for :meth:`start`."""

    def __init__(self, proven: Proven, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._spawn = spawn
        self._places = Places(BULK_TRANSFERS, proven)
        self._listener = BulkListener(lambda wanted: self._transfers.get(wanted))
        self._transfers: dict[bytes, BulkTransfer] = {}
        self._unreachable = PeerBackoff()
        self._useful = Newest[tuple[int, float]](REMEMBERED_MEMBERS)  # connections of each direction, and until when
        self._credentials: Credentials | None = None
        self.port = 0

    def start(self, host: str, p2p_port: int, wanted: int | Literal["auto", "off"], *, listens: bool) -> None:
        """From now on offers are made, unless it is off. ``listens``: others can dial this machine.

        Raises :class:`UserError` when the port that is wanted is taken.
        """
        if wanted == "off":
            return
        self._credentials = Credentials()
        if listens:
            self.port = outside(host, listen(self._listener, host, p2p_port, wanted))
            self._spawn(self._listener.run())

    # -- one transfer

    def offer(self, stream: Stream, size: int, payloads: int = 1, most: int = MOST_CONNECTIONS) -> BulkOffer | None:
        """What to send with the first message of a transfer of ``size`` bytes. Of use to :meth:`agree` only.

        ``payloads`` of each direction, one after the other; ``most``: connections of each.
        """
        if self._credentials is None or size < LEAST_BULK:
            return None
        transfer = BulkTransfer(self._credentials, stream.bandwidth, payloads, most)
        if not self._places.take(stream.remote, lambda: not transfer.closed):
            return None
        stream.bulk = transfer
        if self.port:
            self._transfers = {key: it for key, it in self._transfers.items() if not it.closed}
            self._transfers[transfer.id] = transfer
        dials = tcp_of(stream.origin) is not None and not self._unreachable.avoided(stream.remote)
        certificate = b64encode(self._credentials.certificate).decode()
        return BulkOffer(certificate=certificate, token=transfer.token.hex(), port=self.port, dials=dials)

    async def agree(self, stream: Stream, mine: BulkOffer | None, theirs: BulkOffer | None) -> None:
        """After both offers: ``stream.bulk.ready`` when parts go over direct connections. Raises as streams do."""
        if mine is None or theirs is None or stream.bulk is None:
            return
        first, second = (mine, theirs) if stream.initiator else (theirs, mine)
        if first.dials and second.port:
            dialler = first
        elif second.dials and first.port:
            dialler = second
        else:
            return
        try:
            certificate = b64decode(theirs.certificate, validate=True)
        except ValueError:  # also binascii's
            raise BadMessage("its certificate is none") from None
        stream.bulk.expect(certificate)
        if dialler is mine:
            await self._dial(stream, stream.bulk, theirs)
            await stream.send(BulkReady(ready=stream.bulk.ready), READY_TIMEOUT)
        else:
            stream.bulk.ready = (await stream.receive(BulkReady, READY_TIMEOUT)).ready
            if stream.bulk.ready:
                self._spawn(_watch(stream, stream.bulk))
        if not stream.bulk.ready:
            stream.bulk.close()

    async def _dial(self, stream: Stream, transfer: BulkTransfer, theirs: BulkOffer) -> None:
        place = tcp_of(stream.origin)
        assert place is not None
        transfer.name(bytes.fromhex(theirs.token))
        began = clock.monotonic()
        dialled, useful = _Dialler(stream, transfer, place[0], theirs.port), self._useful_with(stream.remote)
        reason = await dialled.more(dict.fromkeys(Role, min(useful or FIRST_CONNECTIONS, transfer.most)))
        if all(transfer.count(role) for role in Role):
            transfer.ready = True
            self._spawn(self._keep(dialled, Growth((clock.monotonic() - began) / TRIPS_TO_CONNECT, useful)))
            return
        self._unreachable.note(stream.remote, UNREACHABLE_SECONDS, offence=False)
        why = fields(peer=stream.remote[-6:], place=f"{place[0]}:{theirs.port}", reason=reason)
        log.info("no direct connection, parts go over the p2p stream: %s", why)

    async def _keep(self, dialled: _Dialler, growth: Growth) -> None:
        await dialled.keep(growth)
        if growth.settled:
            self._note_useful(dialled.stream.remote, growth.useful)

    def _useful_with(self, peer_id: str) -> int | None:
        count, until = self._useful.get(peer_id, (None, 0.0))
        return count if until > clock.monotonic() else None

    def _note_useful(self, peer_id: str, count: int) -> None:
        """From now on; until when it is known already stays."""
        if self._useful_with(peer_id) is None:
            self._useful[peer_id] = count, clock.monotonic() + USEFUL_SECONDS


def beside(p2p_port: int) -> int:
    """The port that ``auto`` means: the next one, or any free one where the p2p port is."""
    return p2p_port + 1 if 0 < p2p_port < 65535 else 0


def listen(listener: BulkListener, host: str, p2p_port: int, wanted: int | Literal["auto"]) -> int:
    """The port that it has taken. Raises :class:`UserError` when the one that is wanted is taken."""
    try:
        return listener.listen(host, beside(p2p_port) if wanted == "auto" else wanted)
    except UserError:
        if wanted != "auto":
            raise
        return listener.listen(host, 0)


def outside(host: str, port: int) -> int:
    """The port by which others reach ``port`` of this machine, 0 when they do not: some clouds map each to another."""
    cloud = find(host, port)
    return port if cloud is None else (tcp_of(cloud.address) or ("", 0))[1]


def offer(stream: Stream, size: int, payloads: int = 1, most: int = MOST_CONNECTIONS) -> BulkOffer | None:
    """As :meth:`BulkPort.offer`; ``None`` where there is no such port."""
    return None if stream.bulk_port is None else stream.bulk_port.offer(stream, size, payloads, most)


async def agree(stream: Stream, mine: BulkOffer | None, theirs: BulkOffer | None) -> None:
    """As :meth:`BulkPort.agree`."""
    if stream.bulk_port is not None:
        await stream.bulk_port.agree(stream, mine, theirs)


class _Dialler:
    """Makes connections of one transfer as long as it runs."""

    def __init__(self, stream: Stream, transfer: BulkTransfer, host: str, port: int) -> None:
        self.stream, self._transfer, self._host, self._port = stream, transfer, host, port

    async def more(self, missing: dict[Role, int]) -> str:
        """Dial as many connections as are ``missing``; why the last one failed that did."""
        roles = [role for role, count in missing.items() for _ in range(count)]
        return next((it for it in await asyncio.gather(*map(self._one, roles)) if it), "")

    async def _one(self, role: Role) -> str:
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                sock = await connect(self._host, self._port, self._transfer, role)
        except TimeoutError:
            return "no answer"
        except (OSError, ValueError) as error:  # also ssl's; of what is no certificate
            return str(error)
        self._transfer.take(sock, role)
        return ""

    async def keep(self, growth: Growth) -> None:
        """Until the transfer is over: replace what is lost, and add connections while that is of use."""
        transfer, last = self._transfer, clock.monotonic()
        while not transfer.closed:
            await asyncio.sleep(growth.period)
            now = clock.monotonic()
            busy = [role for role in Role if not transfer.side(role).complete]
            if len(busy) == len(Role):  # less comes at the end
                growth.look(transfer.received + transfer.sent, now - last)
            wanted, last = min(growth.wanted, transfer.most), now
            missing = {role: max(0, wanted - transfer.count(role)) for role in busy}
            if transfer.takes_more and any(missing.values()):
                await self.more(missing)
            if self.stream.ended or any(not transfer.count(role) for role in busy if not transfer.side(role).complete):
                transfer.lose(StreamLost("the partner has closed it") if self.stream.ended else None)
                return


async def _watch(stream: Stream, transfer: BulkTransfer) -> None:
    """The listener's side: end a transfer of which the other side makes no connections of a role any more."""
    while not transfer.closed:
        await asyncio.sleep(TRANSFER_LOOK)
        alone = any(not transfer.count(role) and not transfer.side(role).complete for role in Role)
        if stream.ended or (alone and clock.monotonic() - transfer.last_ended > GONE_SECONDS):
            transfer.lose(StreamLost("the partner has closed it") if stream.ended else None)
            return
