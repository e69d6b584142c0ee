"""Who is told where the others are: those that are invited, and nobody more than a few of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from peer.p2p.addresses import LONGEST
from peer.p2p.budgets import DHT_BYTES, DHT_REQUESTS
from peer.p2p.dht import whereabouts
from peer.p2p.dht.whereabouts import ADDRESSES, CLOSEST, FIND_NODE, KADEMLIA_MESSAGES, PING, REQUEST_BYTES, Whereabouts
from peer.p2p.protobuf import delimited, read_delimited
from peer.p2p.stream import Stream
from peer.rounds.backoff import Proven
from tests.unit.virtual import run, stream_pair

ADD_PROVIDER = 2
ANSWER_BYTES = 16_384
IDS = [PeerID(b"\x12\x20" + hashlib.sha256(bytes([number])).digest()) for number in range(30)]
OWN, ASKS, SILENT, *OTHERS = IDS
PLACE = b"/ip4/45.1.2.3/tcp/1"


class Daemon:
    """hivemind's client of one that is connected to all but itself."""

    peer_id = OWN
    lists = 0

    async def get_visible_maddrs(self) -> list[Any]:
        return [SimpleNamespace(to_bytes=lambda: b"own")]

    async def list_peers(self) -> list[Any]:
        self.lists += 1
        return [SimpleNamespace(peer_id=it) for it in IDS if it != OWN]


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer but one has told the daemon an address."""

    async def known(p2p: Any, peer_id: PeerID) -> list[bytes]:
        return [] if peer_id == SILENT else [PLACE]

    monkeypatch.setattr(whereabouts, "known_addresses", known)


def talk(welcome: Callable[[str], bool], scene: Callable[[Stream], Coroutine[Any, Any, None]]) -> Daemon:
    """``scene`` plays who asks; the node that answers has closed its side after it."""
    daemon = Daemon()

    async def both() -> None:
        asks, answers = await stream_pair()
        answers.remote = ASKS.to_base58()
        node = asyncio.ensure_future(Whereabouts(daemon, welcome, Proven()).answer(answers))
        await scene(asks)
        asks.close()
        await node
        assert answers.closed

    run(both())
    return daemon


async def ask(stream: Stream, kind: int = FIND_NODE, key: bytes = b"key") -> Any:
    await stream.write(delimited(KADEMLIA_MESSAGES["Message"](type=kind, key=key)), 5.0)
    return await read_delimited(KADEMLIA_MESSAGES["Message"], stream.reader, ANSWER_BYTES)


def named(answer: Any) -> list[PeerID]:
    return [PeerID(it.id) for it in answer.closerPeers]


def test_who_is_not_invited_is_told_of_nobody_but_the_node_that_it_asks() -> None:
    asked: list[str] = []

    def welcome(peer_id: str) -> bool:
        asked.append(peer_id)
        return False

    async def scene(stream: Stream) -> None:
        answer = await ask(stream)
        assert named(answer) == [OWN] and list(answer.closerPeers[0].addrs) == [b"own"]

    daemon = talk(welcome, scene)
    assert asked == [ASKS.to_base58()] and not daemon.lists


def test_who_is_invited_is_told_of_the_nearest_others() -> None:
    async def scene(stream: Stream) -> None:
        for key in (b"key", b"another"):
            target = int.from_bytes(hashlib.sha256(key).digest(), "big")
            near = sorted(
                (it for it in IDS if it not in (OWN, ASKS)),
                key=lambda it: target ^ int.from_bytes(hashlib.sha256(it.to_bytes()).digest(), "big"),
            )[:CLOSEST]
            answer = await ask(stream, key=key)
            assert answer.type == FIND_NODE and answer.key == key
            assert named(answer) == [it for it in near if it != SILENT]
            assert all(list(it.addrs) == [PLACE] for it in answer.closerPeers)

    talk(lambda _: True, scene)


def test_a_node_that_knows_nobody_else_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that names nobody is none to libp2p."""
    monkeypatch.setattr(Daemon, "list_peers", lambda _: asyncio.sleep(0, [SimpleNamespace(peer_id=ASKS)]))

    async def scene(stream: Stream) -> None:
        assert named(await ask(stream)) == [OWN]

    talk(lambda _: True, scene)


def test_a_ping_is_answered_without_names() -> None:
    async def scene(stream: Stream) -> None:
        answer = await ask(stream, PING)
        assert answer.type == PING and not answer.closerPeers

    talk(lambda _: True, scene)


@pytest.mark.parametrize(
    "said",
    [
        delimited(KADEMLIA_MESSAGES["Message"](type=ADD_PROVIDER, key=b"key")),
        delimited(KADEMLIA_MESSAGES["Message"](key=b"key")),
        delimited(KADEMLIA_MESSAGES["Message"](type=FIND_NODE, key=bytes(REQUEST_BYTES))),
        b"\x02\xff\xff",
    ],
    ids=["another kind", "no kind", "too long", "not protobuf"],
)
def test_anything_else_ends_the_stream(said: bytes) -> None:
    async def scene(stream: Stream) -> None:
        await stream.write(said, 5.0)
        assert await stream.reader.read(1) == b""

    talk(lambda _: True, scene)


def test_who_asks_too_often_is_not_answered() -> None:
    async def scene(stream: Stream) -> None:
        count, most = 0, 2 * DHT_REQUESTS.each * DHT_REQUESTS.burst
        with pytest.raises(asyncio.IncompleteReadError):
            while count < most:
                await ask(stream, PING)
                count += 1
        assert count >= DHT_REQUESTS.each * DHT_REQUESTS.burst

    talk(lambda _: True, scene)


def test_an_answer_counts_by_its_bytes() -> None:
    """A question of 39 bytes brought up to 145 kB, 40 times a second."""
    key, budget = b"k" * 500, DHT_BYTES.each * DHT_BYTES.burst

    async def scene(stream: Stream) -> None:
        used = 0
        with pytest.raises(asyncio.IncompleteReadError):
            while used < 2 * budget:
                used += len(key) + (await ask(stream, key=key)).ByteSize()
        assert 0.9 * budget < used < 1.1 * budget

    talk(lambda _: True, scene)


def test_addresses_are_few_and_no_longer_than_those_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer tells the daemon of each other one any addresses as its own: 20 of them filled an answer of 145 kB."""
    long, good = [b"a" * (LONGEST + 1)] * ADDRESSES, [b"b" * LONGEST, *[PLACE] * ADDRESSES]

    async def known(p2p: Any, peer_id: PeerID) -> list[bytes]:
        return long if peer_id == SILENT else [*long, *good]

    async def scene(stream: Stream) -> None:
        answer = await ask(stream)
        assert len(answer.closerPeers) >= CLOSEST - 1 and SILENT not in named(answer)
        assert all(list(it.addrs) == good[:ADDRESSES] for it in answer.closerPeers)

    monkeypatch.setattr(whereabouts, "known_addresses", known)
    talk(lambda _: True, scene)
