"""The port for direct connections: whoever has not both certificate and token gets nothing from it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from base64 import b64decode

import pytest
from pydantic import ValidationError

from peer.p2p.bandwidth import UNLIMITED
from peer.p2p.budgets import HALF_OPEN
from peer.p2p.bulk import listener, offer
from peer.p2p.bulk.listener import connect
from peer.p2p.bulk.offer import BulkOffer
from peer.p2p.bulk.receiving import NO_MORE, PART_REQUEST
from peer.p2p.bulk.secure import Credentials, handshake, read, ready
from peer.p2p.bulk.transfer import TOKEN_BYTES, BulkTransfer, Role
from peer.p2p.stream import BadMessage
from tests.unit.p2p.bulk.harness import HOST, WAIT, Sides, parts, sides
from tests.unit.p2p.bulk.test_transfers import both_ways

pytestmark = pytest.mark.real_time


def threads() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name == "bulk"]


@pytest.fixture(autouse=True)
def no_threads_of_earlier_tests() -> None:
    """Those of a transfer end some time after it."""
    for it in threads():
        it.join(10)
        assert not it.is_alive()


async def offered(two: Sides) -> BulkOffer:
    """What the called side has offered to the caller, of whose certificate it knows."""
    one, two_ = two.offers()
    assert one is not None and two_ is not None and two.called.stream.bulk is not None
    two.called.stream.bulk.expect(b64decode(one.certificate))
    return two_


def transfer_with(credentials: Credentials, theirs: BulkOffer, token: bytes | None = None) -> BulkTransfer:
    it = BulkTransfer(credentials, UNLIMITED)
    it.name(token or bytes.fromhex(theirs.token))
    it.expect(b64decode(theirs.certificate))
    return it


async def refused(port: int, transfer: BulkTransfer, role: int = Role.PULL) -> None:
    """The listener says no, before its own deadline (:data:`WAIT`) ends a connection of which it says nothing."""
    with pytest.raises(OSError) as refusal:
        async with asyncio.timeout(WAIT / 2):
            await connect(HOST, port, transfer, role)  # type: ignore[arg-type]
    assert not isinstance(refusal.value, TimeoutError)


async def ended(port: int, sent: bytes) -> bool:
    """Does the listener end a connection that has ``sent`` this, without a byte?"""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(sent)
    try:
        async with asyncio.timeout(10):
            return not await reader.read(1)
    except ConnectionResetError:
        return True
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(16), b"\x16\x03\x01" + bytes(600)],
    ids=["silent", "http", "id", "tls"],
)
async def test_a_stranger_is_dropped(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ADMIT_SECONDS", 0.3)
    async with sides() as two:
        theirs = await offered(two)
        assert await ended(theirs.port, sent)
        assert not threads()


@pytest.mark.parametrize("false", ["certificate", "token", "role"])
async def test_a_connection_needs_the_certificate_and_the_token(false: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is right but one. The id is right in all cases: whoever is on the way can read it."""
    async with sides() as two:
        theirs, credentials = await offered(two), two.caller.port._credentials
        assert credentials is not None
        mine = transfer_with(Credentials() if false == "certificate" else credentials, theirs)
        if false == "token":
            mine.token = bytes(TOKEN_BYTES)
        await refused(theirs.port, mine, 7 if false == "role" else Role.PULL)
        assert not threads()
        (await connect(HOST, theirs.port, transfer_with(credentials, theirs), Role.PULL)).close()


async def test_a_token_counts_for_its_own_transfer_and_not_after_it() -> None:
    async with sides() as two, sides() as others:
        theirs, credentials = await offered(two), two.caller.port._credentials
        another = await offered(others)
        assert credentials is not None
        replayed = transfer_with(credentials, another, bytes.fromhex(theirs.token))
        await refused(another.port, replayed)  # at another listener
        two.called.stream.close()
        await refused(theirs.port, transfer_with(credentials, theirs))
        assert not threads()


async def test_a_dialler_refuses_another_certificate() -> None:
    """Somebody else has the port, or is on the way."""
    async with sides() as two:
        credentials, impostor = Credentials(), Credentials()
        theirs = await offered(two)
        mine = two.caller.port._credentials
        assert mine is not None
        server = impostor.context(mine.certificate, server=True)

        async def serve(sock: socket.socket) -> None:
            loop = asyncio.get_running_loop()
            taken, _ = await loop.sock_accept(sock)
            await loop.sock_recv(taken, 16)
            with contextlib.suppress(OSError):
                secure = await handshake(taken, server, mine.certificate, server=True)
                await read(secure, TOKEN_BYTES + 1)
                raise AssertionError("it has shown its token")

        with socket.create_server((HOST, 0)) as sock:
            sock.setblocking(False)
            false = theirs.model_copy(update={"port": sock.getsockname()[1]})
            serving = asyncio.ensure_future(serve(sock))
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(HOST, false.port, transfer_with(mine, false), Role.PULL)
            await serving
        assert credentials.certificate != impostor.certificate


def test_half_open_connections_by_the_thousand_keep_nobody_out() -> None:
    """The oldest of an address make room for new ones; a member's need two round trips only."""

    async def talk() -> None:
        loop = asyncio.get_running_loop()
        async with sides() as two:
            port = two.called.port.port
            with contextlib.ExitStack() as stack:
                for _ in range(1200):
                    sock = stack.enter_context(socket.socket())
                    sock.setblocking(False)
                    await loop.sock_connect(sock, (HOST, port))
                    half_open = two.called.port._listener._half_open
                    assert len(half_open) <= HALF_OPEN.each + 1  # one ends in its next turn
                assert len(half_open) >= HALF_OPEN.each // 2
                await two.agree()
                assert two.called.stream.direct is not None
                await both_ways(two, 20)

    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        asyncio.run(asyncio.wait_for(talk(), 60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("where", ["closed", "silent"])
async def test_where_nobody_answers_parts_go_over_the_stream_and_it_is_remembered(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``silent``: a full backlog drops packets, as a firewall does."""
    monkeypatch.setattr(offer, "DIAL_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind((HOST, 0))
        if where == "silent":
            sock.listen(0)
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    filler.connect(sock.getsockname())
        async with sides(caller_listens=False) as two:
            two.called.port.port = sock.getsockname()[1]
            await two.agree()
            assert two.caller.stream.direct is two.called.stream.direct is None
            await both_ways(two, 3)
            (again, _) = two.offers()
            assert again is not None and not again.dials
            monkeypatch.setattr(offer.clock, "monotonic", lambda: 1e9)
            (later, _) = two.offers()
            assert later is not None and later.dials


async def test_the_port_is_free_at_the_end_although_a_forked_process_has_a_copy_of_it() -> None:
    """A worker of a data loader."""
    first, second = (listener.BulkListener(lambda wanted: None) for _ in range(2))
    port = first.listen(HOST, 0)
    assert first._server is not None
    with first._server.dup():
        running = asyncio.ensure_future(first.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert second.listen(HOST, port) == port
    assert second._server is not None
    second._server.close()


async def test_an_open_transfer_is_one_of_few() -> None:
    async with sides() as two:
        made = [two.called.port.offer(two.called.stream, 2**30) for _ in range(offer.BULK_TRANSFERS.each + 1)]
        assert [it is None for it in made] == [False] * offer.BULK_TRANSFERS.each + [True]


@pytest.mark.parametrize(
    "request_", [(2, 5), (10**5, 0), (0, 10**6), (10**6, 10**6)], ids=["behind", "far", "first", "none"]
)
async def test_a_partner_that_asks_for_what_there_is_not_is_hung_up_on(request_: tuple[int, int]) -> None:
    async with sides() as two:
        theirs, credentials = await offered(two), two.caller.port._credentials
        assert credentials is not None and two.called.stream.bulk is not None
        two.called.stream.bulk.ready = True
        send = asyncio.ensure_future(two.called.stream.bulk.send(parts(10**6), 5))
        sock = await connect(HOST, theirs.port, transfer_with(credentials, theirs), Role.PULL)
        await ready(sock, lambda: sock.send(PART_REQUEST.pack(*request_)))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(5):
                await read(sock, 1)
        assert isinstance(two.called.stream.bulk._last_loss, BadMessage)
        sock.close()
        sock = await connect(HOST, theirs.port, transfer_with(credentials, theirs), Role.PULL)
        await ready(sock, lambda: sock.send(PART_REQUEST.pack(NO_MORE, 0)))
        await send
        sock.close()


async def test_a_certificate_that_is_none_is_a_bad_message_or_no_connection() -> None:
    async with sides() as two:
        one, other = two.offers()
        assert other is not None
        for text in ("no base64!", "\u00e9"):
            with pytest.raises(BadMessage):
                await two.caller.port.agree(two.caller.stream, one, other.model_copy(update={"certificate": text}))
        for text in ("AAAA", ""):
            empty = other.model_copy(update={"certificate": text})
            await two.caller.port.agree(two.caller.stream, one, empty)
            assert two.caller.stream.direct is None
        for text in ("", "\u00e9", "no base64!"):
            with pytest.raises(ValidationError):
                BulkOffer.model_validate({**other.model_dump(), "certificate": text})
