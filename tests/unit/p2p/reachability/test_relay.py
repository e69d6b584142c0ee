"""The relay's messages, slots and bounds, without libp2p; with libp2p at both ends in tests/netlab/test_nat.py."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hivemind.p2p import PeerID
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import clock
from peer.p2p import budgets
from peer.p2p.bandwidth import BURST, UNLIMITED, Bandwidth
from peer.p2p.budgets import Limit, Rate
from peer.p2p.identity import LONGEST_ID
from peer.p2p.reachability import circuit_messages, relay, reservations
from peer.p2p.reachability.relay import Relay
from peer.p2p.reachability.reservations import Reservations, try_reservation
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.backoff import Proven
from tests.unit.virtual import line

HOLDER, CALLER = "QmYbAnMcVeRLg6kmQ1Z4XT2Q4aBH3VTsd3GRYc7HZoFSer", "QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ"
# as go-libp2p writes it: kind CONNECT, a peer with the 34 bytes of an id
CONNECT = bytes.fromhex("08011224") + b"\x0a\x22" + PeerID.from_base58(HOLDER).to_bytes()


async def pair(remote: str, other: str) -> tuple[Stream, Stream]:
    """Both ends of a connection; the first one's ``remote`` is ``remote``."""
    near, far = line(asyncio.get_running_loop())
    return Stream(*await near(), remote=remote, initiator=True), Stream(*await far(), remote=other, initiator=False)


def parsed(data: bytes) -> tuple[int, bytes]:
    async def read() -> tuple[int, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await circuit_messages.read_hop(reader)

    return asyncio.run(read())


def test_a_call_is_read_as_libp2p_writes_it() -> None:
    hop = parsed(bytes([len(CONNECT)]) + CONNECT)
    assert hop == (circuit_messages.CONNECT, PeerID.from_base58(HOLDER).to_bytes())
    assert circuit_messages.hop_status(circuit_messages.OK) == bytes.fromhex("0408022864")
    assert circuit_messages.hop_status(circuit_messages.NO_RESERVATION) == bytes.fromhex("05080228cc01")
    assert circuit_messages.stop_connect(b"ab") == bytes.fromhex("08080012040a026162")


def test_fields_that_a_relay_does_not_use_are_skipped() -> None:
    limit = bytes.fromhex("2204") + b"\x08\x78\x10\x7f"  # field 4 of libp2p's: a limit of seconds and bytes
    assert parsed(bytes([len(limit + CONNECT)]) + limit + CONNECT) == parsed(bytes([len(CONNECT)]) + CONNECT)
    unknown = bytes.fromhex("0863")  # a kind that is not known stays as it came, and is refused by the relay
    assert parsed(bytes([len(unknown)]) + unknown) == (99, b"")
    assert parsed(b"\x00") == (0, b"")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(BadMessage, asyncio.IncompleteReadError):
        assert len(parsed(data)[1]) <= LONGEST_ID


@pytest.mark.parametrize("data", [b"\xff\xff\x03", b"\x80\x80\x80\x80\x01", b"\x03\x12\x7f\x00", b"\x02\x0b\x00"])
def test_nonsense_and_what_is_too_long_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        parsed(data)


class Network:
    """Opens streams to a relay, and from it to the holder, whose answer is ``status``."""

    def __init__(self, status: int = circuit_messages.OK) -> None:
        self.proven = Proven()
        self.relay = Relay(self.call, self.proven)
        self.status, self.bandwidth = status, UNLIMITED
        self.called: list[Stream] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.callers: list[str] = []

    async def call(self, peer_id: str, protocol: str) -> Stream:
        assert (peer_id, protocol) == (HOLDER, circuit_messages.STOP)
        near, far = await pair(peer_id, "relay")
        near.bandwidth = self.bandwidth
        self.called.append(far)
        self.tasks.append(asyncio.ensure_future(self.answer(far)))
        return near

    async def answer(self, far: Stream) -> None:
        """As libp2p at the holder does."""
        head = await far.reader.readexactly(1)
        assert (
            await far.reader.readexactly(head[0])
            == circuit_messages.stop_connect(PeerID.from_base58(self.callers[-1]).to_bytes())[1:]
        )
        answer = bytes.fromhex("080120") + (b"\x64" if self.status == circuit_messages.OK else b"\x00")
        await far.write(bytes([len(answer)]) + answer, 1)

    async def open(self, peer_id: str, protocol: str, addresses: object) -> Stream:
        """To the relay, as the holder."""
        near, far = await pair("relay", HOLDER)
        assert protocol == relay.RELAY_PROTOCOL
        self.tasks.append(asyncio.ensure_future(self.relay.hold(far)))
        return near

    async def hop(self, caller: str = CALLER) -> tuple[Stream, int]:
        """Call the holder; the caller's stream and the relay's answer."""
        self.callers.append(caller)
        near, far = await pair("relay", caller)
        far.bandwidth = self.bandwidth
        self.tasks.append(asyncio.ensure_future(self.relay.hop(far)))
        await near.write(bytes([len(CONNECT)]) + CONNECT, 1)
        said = await near.reader.readexactly((await near.reader.readexactly(1))[0])
        status = int.from_bytes(bytes(it & 0x7F for it in said[3:4]), "big") + (said[4] << 7 if len(said) > 4 else 0)
        return near, status


async def held(network: Network) -> Reservations:
    slots = Reservations(network.open, ["/ip4/45.1.2.3/tcp/31337/p2p/QmRelay"])
    slots.start(asyncio.ensure_future, reservations.RELAYS)
    assert await slots.first(5)
    return slots


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("relays", "origin", "told"),
    [
        (["/dns4/bootstrap/tcp/31337"], "/ip4/172.30.94.2/tcp/31337", "/ip4/172.30.94.2/tcp/31337"),
        (["/dns4/bootstrap/tcp/31337", "/ip4/45.1.2.3/tcp/5"], "/ip4/172.30.94.2/tcp/31337", "/ip4/45.1.2.3/tcp/5"),
        (["/ip4/45.1.2.3/tcp/5"], "/ip4/45.9.9.9/tcp/6", "/ip4/45.1.2.3/tcp/5"),
        (["/dns4/example.org/tcp/31337"], "", "/dns4/example.org/tcp/31337"),
    ],
)
async def test_others_are_told_a_number_of_the_relay_where_there_is_one(
    relays: list[str], origin: str, told: str
) -> None:
    """A name of a container network means nothing elsewhere, and to ask for it takes seconds."""
    network = Network()

    async def open_stream(peer_id: str, protocol: str, addresses: object) -> Stream:
        stream = await network.open(peer_id, protocol, addresses)
        stream.origin = origin
        return stream

    slots = Reservations(open_stream, [f"{it}/p2p/QmSome" for it in relays])
    slots.start(asyncio.ensure_future, 1)
    assert await slots.first(5)
    assert slots.places == [f"{told}/p2p/QmSome/p2p-circuit"]


@pytest.mark.real_time
async def test_bytes_pass_both_ways_between_a_caller_and_a_holder() -> None:
    network = Network()
    slots = await held(network)
    assert slots.places == ["/ip4/45.1.2.3/tcp/31337/p2p/QmRelay/p2p-circuit"]
    caller, status = await network.hop()
    assert status == circuit_messages.OK
    called = network.called[0]
    data = bytes(range(256)) * 4096  # 1 MiB: the daemon's own relay would have cut it at 128 KiB
    for source, sink in ((caller, called), (called, caller)):
        sending = asyncio.ensure_future(source.write(data, 5))
        assert await sink.reader.readexactly(len(data)) == data
        await sending
    called.close()
    assert await caller.reader.read() == b""  # one end is the end of both
    assert not network.relay._circuits


@pytest.mark.real_time
async def test_a_circuit_has_its_share_of_the_relays_line_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CIRCUIT_BYTES", Rate(each=2**20, all=2**40, burst=1))
    now, paused = [0.0], asyncio.sleep

    async def sleep(seconds: float) -> None:
        """Only what waits for its share moves the clock: others sleep too."""
        now[0] += seconds if seconds == budgets.PACE else 0.0
        await paused(0 if seconds == budgets.PACE else seconds)

    network = Network()
    await held(network)
    caller, _ = await network.hop()
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(budgets.asyncio, "sleep", sleep)
    data = bytes(5 * 2**20)
    sending = asyncio.ensure_future(caller.write(data, 5))
    assert await network.called[0].reader.readexactly(len(data)) == data
    await sending
    assert now[0] == pytest.approx(4.0, abs=0.2), "the first second's share is saved"


@pytest.mark.real_time
@pytest.mark.parametrize("limits", [("16mbit", None), (None, "16mbit")])
async def test_what_a_relay_forwards_is_within_its_own_limits(limits: tuple[str | None, str | None]) -> None:
    network = Network()
    network.bandwidth = Bandwidth.of(*limits)
    await held(network)
    caller, _ = await network.hop()
    began = clock.monotonic()
    sending = asyncio.ensure_future(caller.write(bytes(2**20), 5))
    await network.called[0].reader.readexactly(2**20)
    await sending
    assert clock.monotonic() - began >= 2**20 / 2e6 - BURST


async def test_what_a_relay_forwards_leaves_its_own_parts_their_turns() -> None:
    """It took 64 KiB at a time, and a part of its own swap a tenth of that: the swap had 6% of the line."""
    network = Network()
    network.bandwidth = Bandwidth.of("1mbit", None)
    await held(network)
    caller, _ = await network.hop()
    sending = asyncio.ensure_future(caller.write(bytes(2**20), 60))
    reading = asyncio.ensure_future(network.called[0].reader.readexactly(2**20))
    began, line = clock.monotonic(), network.bandwidth.up
    for piece in line.pieces(bytes(2**17)):  # a second of the line
        await line.take(len(piece))
    seconds = clock.monotonic() - began
    sending.cancel()
    reading.cancel()
    assert seconds < 4.0


@pytest.mark.real_time
async def test_nobody_is_called_who_holds_no_slot_or_does_not_want_to() -> None:
    statuses = [(await Network().hop())[1]]
    for network in (Network(status=0), Network()):
        await held(network)
        statuses.append((await network.hop(CALLER if network.status != circuit_messages.OK else HOLDER))[1])
    assert statuses == [
        circuit_messages.NO_RESERVATION,
        circuit_messages.CONNECTION_FAILED,
        circuit_messages.NO_RESERVATION,
    ]


async def test_circuits_and_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CIRCUITS", Limit(each=2, all=256))
    monkeypatch.setattr(relay, "RESERVATIONS", 0)
    network = Network()
    with pytest.raises(StreamLost, match="taken"):
        await try_reservation(network.open, "/ip4/45.1.2.3/tcp/31337/p2p/QmRelay")
    relay.RESERVATIONS = 1
    await held(network)
    hops = [await network.hop() for _ in range(3)]
    assert [status for _, status in hops] == [
        circuit_messages.OK,
        circuit_messages.OK,
        circuit_messages.LIMIT_EXCEEDED,
    ]
    for called in network.called:
        called.close()
    await asyncio.sleep(0.1)
    assert (await network.hop())[1] == circuit_messages.OK


async def test_no_crowd_of_new_ids_takes_the_places_of_the_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 of them had all reservations of a relay, and a member behind a NAT got none."""
    monkeypatch.setattr(relay, "RESERVATIONS", 1)
    network = Network()
    for peer_id in ("old", "older"):
        network.proven.add(peer_id)
    granted = [await gets_a_place(network, it) for it in ("old", "new", "newer", "older", "newest", "new")]
    assert set(network.relay._slots) == {"old", "new", "older"}
    assert granted == [True, True, False, True, False, True]


async def gets_a_place(network: Network, holder: str) -> bool:
    near, far = await pair("relay", holder)
    network.tasks.append(asyncio.ensure_future(network.relay.hold(far)))
    await near.send(relay.Reserve(), 1)
    try:
        await near.receive(relay.Granted, 1)
    except StreamLost:
        return False
    return True


@pytest.mark.real_time
async def test_the_circuit_that_is_unused_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p keeps a connection that nobody uses, with a few bytes every 30 s."""
    monkeypatch.setattr(relay, "CIRCUITS", Limit(each=32, all=2))
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    network = Network()
    await held(network)
    first, _ = await network.hop()
    second, _ = await network.hop()
    now[0] = relay.CIRCUIT_UNUSED - 1
    assert (await network.hop())[1] == circuit_messages.LIMIT_EXCEEDED
    await first.write(bytes(relay.SIGN_OF_LIFE + 1), 1)
    await second.write(bytes(relay.SIGN_OF_LIFE), 1)
    for called, size in zip(network.called, (relay.SIGN_OF_LIFE + 1, relay.SIGN_OF_LIFE), strict=True):
        await called.reader.readexactly(size)
    now[0] += 2
    third, status = await network.hop()
    assert status == circuit_messages.OK
    assert await second.reader.read() == b""
    assert (await network.hop())[1] == circuit_messages.LIMIT_EXCEEDED
    for stream, called in zip((first, third), (network.called[0], network.called[2]), strict=True):
        await stream.write(b"more", 1)
        assert await called.reader.readexactly(4) == b"more"


async def test_a_slot_ends_with_its_stream_and_is_taken_again() -> None:
    network = Network()
    slots = await held(network)
    network.relay._slots[HOLDER].close()
    for _ in range(100):
        await asyncio.sleep(0.05)
        if not slots.places:
            break
    assert not slots.places  # it is not announced any more
    for _ in range(100):
        await asyncio.sleep(0.05)
        if slots.places:
            break
    assert slots.places and (await network.hop())[1] == circuit_messages.OK


async def test_reservations_are_given_back_and_made_again() -> None:
    """By a peer that others can dial again, and then cannot."""
    network = Network()
    slots = await held(network)
    slots.stop()
    await asyncio.sleep(0.1)
    assert not slots.places and not network.relay._slots and not await slots.first(30)
    slots.start(asyncio.ensure_future, reservations.RELAYS)
    assert await slots.first(5) and len(slots.places) == 1 and len(network.relay._slots) == 1


async def test_a_relay_that_is_full_is_replaced_by_another_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    full = True

    monkeypatch.setattr(relay, "RESERVATIONS", relay.RESERVATIONS)
    network = Network()

    async def open_stream(peer_id: str, protocol: str, addresses: object) -> Stream:
        asked.append(peer_id)
        relay.RESERVATIONS = 0 if full and peer_id == "QmFirst" else 1
        return await network.open(peer_id, protocol, addresses)

    kept = Reservations(open_stream, ["/ip4/45.1.2.3/tcp/31337/p2p/QmFirst"])
    kept._others = lambda: ["/ip4/45.1.2.4/tcp/31337/p2p/QmMember"]
    kept.start(asyncio.ensure_future, 1)
    assert await kept.first(5)
    assert kept.places == ["/ip4/45.1.2.4/tcp/31337/p2p/QmMember/p2p-circuit"]
    full = False
    await asyncio.sleep(1.2 * reservations.PAUSE)  # until the first one may be asked again
    network.relay._slots[HOLDER].close()
    while len(asked) < 3:  # noqa: ASYNC110 - nothing says so
        await asyncio.sleep(0.05)
    assert asked == ["QmFirst", "QmMember", "QmFirst"]


def test_a_member_of_a_private_network_is_asked_last() -> None:
    """A peer behind a NAT that has no relay yet has no other address: it cannot relay to anybody."""
    public, private = (f"/ip4/{host}/tcp/4000/p2p/Qm{name}" for host, name in (("45.1.2.4", "B"), ("192.168.1.7", "A")))
    kept = Reservations(Network().open, [])
    kept._others = lambda: [private, public, private]
    assert {kept._choose() for _ in range(20)} == {public}
    kept._others = lambda: [private]
    assert kept._choose() == private


async def test_a_holder_that_falls_silent_loses_its_slot() -> None:
    network = Network()
    stream = await network.open("relay", relay.RELAY_PROTOCOL, ())
    await stream.send(relay.Reserve(), 1)
    await asyncio.sleep(relay.RESERVATION_SILENCE - 1)
    await stream.send(relay.Ping(number=1), 1)
    await asyncio.sleep(relay.RESERVATION_SILENCE - 1)
    assert (await network.hop())[1] == circuit_messages.OK
    await asyncio.sleep(5)  # the pause after a pong is a part of it
    assert (await network.hop())[1] == circuit_messages.NO_RESERVATION
