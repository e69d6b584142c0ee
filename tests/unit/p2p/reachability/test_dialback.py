"""Who is dialled back, how often, and what a fresh connection proves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from hivemind.proto import crypto_pb2
from pydantic import ValidationError

from peer import clock
from peer.p2p import identity
from peer.p2p.addresses import CIRCUIT, for_record, is_circuit, is_private, owner_of, place_of, tcp_of, tcp_place
from peer.p2p.budgets import DIALBACKS
from peer.p2p.daemon import Daemon
from peer.p2p.reachability import decide as module
from peer.p2p.reachability import dialback, tls_probe
from peer.p2p.reachability.decide import Reachability, decide
from peer.p2p.reachability.dialback import AT_ONCE, Answer, Busy, DialBack, Heard, ask
from peer.p2p.reachability.tls_probe import NotLibp2p, who_answers
from peer.p2p.stream import Stream, StreamLost
from tests.unit.virtual import line, took
from tests.unit.virtual import run as in_virtual_time

T = TypeVar("T")
ME, OTHER = "QmYbAnMcVeRLg6kmQ1Z4XT2Q4aBH3VTsd3GRYc7HZoFSer", "QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ"
RELAY = f"/ip4/45.1.2.3/tcp/31337/p2p/{OTHER}"


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


class Dialled:
    """Notes who is dialled and answers as told: a peer id, or what is raised."""

    def __init__(self, answers: dict[tuple[str, int], str | Exception]) -> None:
        self.calls: list[tuple[str, int]] = []
        self._answers = answers

    async def __call__(self, host: str, port: int, timeout: float) -> str:
        self.calls.append((host, port))
        answer = self._answers.get((host, port), TimeoutError())
        if isinstance(answer, Exception):
            raise answer
        return answer


async def asked(served: DialBack, origin: str, places: list[str]) -> Heard | Busy:
    """One question of :data:`ME`, whose connection comes from ``origin``, over a real socket."""
    done: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done.append(asyncio.current_task())  # type: ignore[arg-type]
        await served.answer(Stream(reader, writer, remote=ME, initiator=False, origin=origin))

    async def dial(peer_id: str, protocol: str, addresses: Sequence[str]) -> Stream:
        port = server.sockets[0].getsockname()[1]
        return Stream(*await asyncio.open_connection("127.0.0.1", port), remote=peer_id, initiator=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        return await ask(dial, OTHER, [], places)


def test_only_the_address_that_the_question_comes_from_is_dialled() -> None:
    dialled = Dialled({("45.0.0.9", 4001): ME, ("45.0.0.9", 4002): OTHER, ("45.0.0.9", 4003): ConnectionRefusedError()})
    places = [f"/ip4/45.0.0.9/tcp/{port}" for port in (4001, 4002, 4003)]
    victim = "/ip4/8.8.8.8/tcp/443"
    heard = run(asked(DialBack(dialled), "/ip4/45.0.0.9/tcp/60000", [*places, victim]))
    assert isinstance(heard, Heard)
    assert [it.result for it in heard.answer.tried] == ["reached", "another", "refused", "not_yours"]
    assert sorted(dialled.calls) == [("45.0.0.9", port) for port in (4001, 4002, 4003)]  # and not the third party
    assert heard.answer.observed == "45.0.0.9"
    assert abs(heard.ahead) < 0.5


@pytest.mark.parametrize(
    "place",
    [
        "/dns4/localhost/tcp/4001",  # a name may lead anywhere
        f"{RELAY}/p2p-circuit",
        "/ip4/45.0.0.9/udp/4001/quic",
        "/ip4/45.0.0.9/tcp/0",
        "/ip4/45.0.0.9/tcp/4001/http",
        "/ip6/::ffff:45.0.0.9/tcp/4001",
        "nonsense",
        "",
    ],
)
def test_what_is_no_address_of_the_asker_is_not_dialled(place: str) -> None:
    dialled = Dialled({})
    heard = run(asked(DialBack(dialled), "/ip4/45.0.0.9/tcp/60000", [place]))
    assert isinstance(heard, Heard) and [it.result for it in heard.answer.tried] == ["not_yours"]
    assert not dialled.calls


def test_who_comes_through_a_relay_is_not_dialled_where_the_relay_is() -> None:
    dialled = Dialled({})
    origin = f"{RELAY}/p2p-circuit"
    heard = run(asked(DialBack(dialled), origin, ["/ip4/45.1.2.3/tcp/31337"]))
    assert isinstance(heard, Heard) and heard.answer.observed == ""
    for text in ("x", "45.0.0.9\n", "45.0.0.256"):  # where it goes, only an address can be read
        with pytest.raises(ValidationError):
            Answer.model_validate({**heard.answer.model_dump(), "observed": text})
    assert not dialled.calls


@pytest.mark.real_time
async def test_who_asks_too_often_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    each = int(DIALBACKS.each * DIALBACKS.burst)

    monkeypatch.setattr("peer.p2p.budgets.clock.monotonic", lambda: 0.0)
    served = DialBack(Dialled({}))
    *answers, last = [await asked(served, origin, []) for origin in ["/ip4/45.0.0.9/tcp/1"] * (each + 1)]
    assert all(isinstance(it, Heard) for it in answers)
    assert isinstance(last, Busy) and last.seconds == 1 / DIALBACKS.each


def test_a_fresh_connection_proves_who_listens(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    peer_id = identity.load_or_create(key)
    daemon = Daemon(identity=key, address="/ip4/127.0.0.1/tcp/0")
    try:
        port = listening_port(daemon.pid)
        assert run(who_answers("127.0.0.1", port, 5)) == peer_id
    finally:
        daemon.stop()
    with pytest.raises(OSError):
        run(who_answers("127.0.0.1", port, 5))


def listening_port(pid: int) -> int:
    return next(int(it.laddr.port) for it in psutil.Process(pid).net_connections("tcp") if it.status == "LISTEN")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x13/multistream/1.0.0\n\x03na\n", None])
def test_who_is_no_node_proves_nothing(said: bytes | None) -> None:
    async def meet() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if said is None:
                await reader.read()
                return
            writer.write(said)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await who_answers("127.0.0.1", server.sockets[0].getsockname()[1], 1)

    with pytest.raises(NotLibp2p if said is not None else TimeoutError):
        run(meet())


def test_an_identity_is_an_rsa_key() -> None:
    """Those of our nodes are. libp2p has Ed25519 keys too, with another form of id."""
    session, ours = ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    signed = tls_probe._SIGNED_PREFIX + session.public_key().public_bytes(*form)

    def certificate(kind: int, public: bytes, signature: bytes) -> tuple[bytes, bytes]:
        key = crypto_pb2.PublicKey(key_type=kind, data=public).SerializeToString()
        value = asn1.encode_der(tls_probe.SignedKey(public_key=key, signature=signature))
        name, now = x509.Name([]), datetime.now(UTC)
        builder = x509.CertificateBuilder(name, name, session.public_key(), 1, now, now + timedelta(1))
        extended = builder.add_extension(x509.UnrecognizedExtension(tls_probe._EXTENSION, value), critical=False)
        return key, extended.sign(session, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    signature = ours.sign(signed, padding.PKCS1v15(), hashes.SHA256())
    key, made = certificate(crypto_pb2.RSA, ours.public_key().public_bytes(*form), signature)
    assert tls_probe._peer_id(made) == identity.id_of(key)
    short = ed25519.Ed25519PrivateKey.generate()
    for public in short.public_key().public_bytes_raw(), short.public_key().public_bytes(*form):
        _, made = certificate(crypto_pb2.Ed25519, public, short.sign(signed))
        with pytest.raises(NotLibp2p):
            tls_probe._peer_id(made)


def test_addresses() -> None:
    circuit = f"{RELAY}{CIRCUIT}"
    assert (owner_of(RELAY), place_of(RELAY)) == (OTHER, "/ip4/45.1.2.3/tcp/31337")
    assert (owner_of(circuit), place_of(circuit)) == ("", circuit)
    assert (owner_of(f"{circuit}/p2p/{ME}"), place_of(f"{circuit}/p2p/{ME}")) == (ME, circuit)
    assert is_circuit(circuit) and not is_circuit(RELAY)
    assert tcp_of(RELAY) == ("45.1.2.3", 31337) and tcp_of(circuit) is None and tcp_of("/ip4/999.1.1.1/tcp/1") is None
    assert tcp_of("/ip6/2001:db8:0::1/tcp/5") == ("2001:db8::1", 5)
    assert tcp_place("2001:db8::1", 5) == "/ip6/2001:db8::1/tcp/5"
    assert is_private("192.168.1.2") and is_private("100.64.0.1") and not is_private("203.0.113.5")
    assert is_private("fd00::1") and is_private("fe80::1") and is_private("::1") and not is_private("2001:db8::1")
    long = "/dns4/" + "a" * 120 + "/tcp/1"
    assert for_record([f"/ip4/127.0.0.1/tcp/5/p2p/{ME}", f"{circuit}/p2p/{ME}", long]) == (circuit,)
    assert for_record([f"/ip4/127.0.0.1/tcp/5/p2p/{ME}"]) == ("/ip4/127.0.0.1/tcp/5",)


class Others:
    """Initial peers, each of which sees us at an address and can dial some of our places. ``opened``: streams to each,
    one for a question.
    """

    def __init__(self, *views: tuple[str, dict[tuple[str, int], str | Exception]]) -> None:
        self._served = [(origin, DialBack(Dialled(reachable))) for origin, reachable in views]
        self._answers: list[asyncio.Future[None]] = []
        self.opened = Counter[int]()
        self.addresses = [
            f"/ip4/45.0.0.{number}/tcp/1/p2p/{RELAY[-46:-1]}{number}" for number in range(1, len(views) + 1)
        ]

    async def open(self, peer_id: str, protocol: str, addresses: object) -> Stream:
        number = int(peer_id[-1])
        self.opened[number] += 1
        origin, served = self._served[number - 1]

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await served.answer(Stream(reader, writer, remote=ME, initiator=False, origin=origin))

        near, far = line(asyncio.get_running_loop())
        self._answers.append(asyncio.ensure_future(accept(*await far())))
        return Stream(*await near(), remote=peer_id, initiator=True)


def decided(others: Others, *own: str) -> Reachability:
    return in_virtual_time(deciding(others, *own))


async def deciding(others: Others, *own: str) -> Reachability:
    async def visible() -> tuple[str, ...]:
        return tuple(f"{place}/p2p/{ME}" for place in own)

    return await decide(others.open, visible, others.addresses, upnp=False)


class Silence(Dialled):
    """Nothing comes back from where it dials."""

    def __init__(self) -> None:
        super().__init__({})
        self.dialling = 0

    async def __call__(self, host: str, port: int, timeout: float) -> str:
        self.dialling += 1
        await asyncio.sleep(timeout)
        return await super().__call__(host, port, timeout)


HOME, LOOPBACK = "/ip4/192.168.1.2/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
SEEN = "/ip4/45.0.0.9/tcp/61000"


def test_who_can_be_dialled_stays_as_it_is() -> None:
    public = "/ip4/45.0.0.9/tcp/4001"
    assert decided(Others((SEEN, {("45.0.0.9", 4001): ME})), LOOPBACK, public) == Reachability()


def test_behind_a_nat_relays_are_used() -> None:
    assert decided(Others((SEEN, {}), (SEEN, {})), HOME, LOOPBACK) == Reachability(relayed=True)


def test_an_address_that_only_others_know_is_announced() -> None:
    """A cloud machine, or a port that was forwarded by hand."""
    stand = decided(Others((SEEN, {("45.0.0.9", 4001): ME})), HOME)
    assert stand == Reachability(announce=("/ip4/45.0.0.9/tcp/4001", HOME))


def with_upnp(others: Others, *looks: tuple[str, ...]) -> tuple[Reachability, float]:
    """What is decided, and in how many seconds. ``looks``: our own addresses at each look, the last ones for ever."""
    seen = iter(looks)

    async def visible() -> tuple[str, ...]:
        return tuple(f"{place}/p2p/{ME}" for place in next(seen, looks[-1]))

    async def timed() -> tuple[Reachability, float]:
        began = clock.monotonic()
        return await decide(others.open, visible, others.addresses, upnp=True), clock.monotonic() - began

    return in_virtual_time(timed())


ONE_VIEW = 2  # questions: as whom it sees us, and where it can dial us


def test_an_address_that_the_router_adds_late_is_waited_for() -> None:
    mapped = "/ip4/45.0.0.9/tcp/5001"
    others = Others(*[(SEEN, {("45.0.0.9", 5001): ME})] * 2)
    stand, seconds = with_upnp(others, (HOME,), (HOME,), (HOME, mapped))
    assert stand == Reachability()
    assert seconds == took(2 * module.UPNP_PAUSE)
    assert others.opened == {1: 2 * ONE_VIEW, 2: 2 * ONE_VIEW}


def test_who_waits_for_a_router_that_adds_nothing_asks_each_peer_once() -> None:
    others = Others((SEEN, {}), (SEEN, {}))
    stand, seconds = with_upnp(others, (HOME,))
    assert stand == Reachability(relayed=True)
    assert seconds == took(module.UPNP_SECONDS)
    assert others.opened == {1: ONE_VIEW, 2: ONE_VIEW}


def test_a_public_address_that_this_node_had_before_is_announced_no_more() -> None:
    """The daemon says what it was told to announce when it began."""
    stand = decided(Others((SEEN, {("45.0.0.9", 4001): ME})), "/ip4/45.0.0.1/tcp/4001", HOME)
    assert stand == Reachability(announce=("/ip4/45.0.0.9/tcp/4001", HOME))


def test_who_is_dialled_by_private_addresses_only_cannot_be_dialled_from_other_networks() -> None:
    """The initial peers are in its own local network; others may come through a port of theirs that is forwarded."""
    home = ("/ip4/192.168.1.2/tcp/61000", {("192.168.1.2", 4001): ME})
    assert decided(Others(home, home), HOME) == Reachability(local=True)
    assert decided(Others(home, (SEEN, {("45.0.0.9", 4001): ME})), HOME) == Reachability(
        announce=("/ip4/45.0.0.9/tcp/4001", HOME)
    )


def test_one_that_cannot_dial_us_is_enough_for_relays() -> None:
    """The other may be in our own local network."""
    local = ("/ip4/192.168.1.7/tcp/61000", {("192.168.1.2", 4001): ME})
    assert decided(Others(local, (SEEN, {})), HOME).relayed


@pytest.mark.real_time
async def test_many_that_start_at_once_all_learn_that_they_are_behind_a_nat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node answers few at a time. Whom it had no time for took itself for one that others can dial."""
    monkeypatch.setattr(dialback, "DIAL_TIMEOUT", 0.3)
    silence = Silence()
    served = DialBack(silence)
    works = []
    for number in range(2 * AT_ONCE):
        others = Others(("", {}))
        others._served = [(f"/ip4/45.0.0.{number}/tcp/1", served)]
        works.append(asyncio.ensure_future(deciding(others, HOME)))
        while number == AT_ONCE - 1 and silence.dialling < AT_ONCE:  # noqa: ASYNC110 - the first ones keep it busy
            await asyncio.sleep(0.001)
    assert all(it.relayed for it in await asyncio.gather(*works))


def test_who_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line was cut just then: a peer behind a NAT took itself for one that others can dial."""
    others, failures = Others((SEEN, {})), [StreamLost("reset"), TimeoutError()]
    open_stream = others.open

    async def fails_at_first(*call: Any) -> Stream:
        if failures:
            raise failures.pop()
        return await open_stream(*call)

    monkeypatch.setattr(others, "open", fails_at_first)
    assert decided(others, HOME).relayed


def test_where_no_initial_peer_answers_members_are_asked() -> None:
    """A peer asked those of its start for ever, which were gone."""
    assert by_members(Others(), HOME) == Reachability(unknown=True)
    assert by_members(Others((SEEN, {}), (SEEN, {})), HOME) == Reachability(relayed=True, by_members=True)


def by_members(members: Others, *own: str) -> Reachability:
    """What is decided when no initial peer answers."""

    async def visible() -> tuple[str, ...]:
        return tuple(f"{place}/p2p/{ME}" for place in own)

    async def either(peer_id: str, protocol: str, addresses: Any) -> Stream:
        if addresses == ["/dead"]:
            raise StreamLost("reset")
        return await members.open(peer_id, protocol, addresses)

    return in_virtual_time(decide(either, visible, ["/dead"], otherwise=members.addresses))


async def test_when_one_has_answered_the_others_have_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others((SEEN, {}), (SEEN, {("45.0.0.9", 4001): ME}))
    open_stream = others.open

    async def hangs(peer_id: str, *call: Any) -> Stream:
        if peer_id.endswith("1"):
            await asyncio.sleep(60)
        return await open_stream(peer_id, *call)

    monkeypatch.setattr(others, "open", hangs)
    began = clock.monotonic()
    stand, seconds = await deciding(others, HOME), clock.monotonic() - began
    assert stand == Reachability(announce=("/ip4/45.0.0.9/tcp/4001", HOME))
    assert seconds == took(module.OTHERS_SECONDS)


def test_when_nobody_can_tell_nothing_changes() -> None:
    assert decided(Others((f"{RELAY}/p2p-circuit", {})), HOME) == Reachability(unknown=True)
