"""A search of the DHT whose nearest nodes may all be an attacker's: who else is asked, and when."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from peer import clock
from peer.p2p.dht import search
from peer.p2p.dht.anchors import MOST_INITIAL, MOST_PROVEN, anchors_of
from peer.p2p.dht.search import ANSWERED_SECONDS, COPIES, FINGERPRINT_BYTES, NEAR_SECONDS, SAID, id_of
from peer.rounds.backoff import Proven
from tests.unit.virtual import run

KEY = "demo/members/0/0"
NEAR, TIMEOUT = 1000, 2.0  # distance of the nodes from the key, at most; seconds
ME = PeerID(b"\x12\x20" + bytes(32))


def node(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + number.to_bytes(32, "big"))


def place(distance: int) -> DHTID:
    return DHTID(int(id_of(KEY)) ^ distance)


class Net:
    """``near``: the nodes that the asker knows, by their distance from the key; ``slow``: seconds until one answers."""

    def __init__(self, near: dict[int, PeerID], *, client: bool = False) -> None:
        self.near, self.slow = near, dict[PeerID, float]()
        self.silent, self.held = set[PeerID](), dict[PeerID, list[str]]()  # subkeys
        self.names: dict[PeerID, dict[int, PeerID]] = {}  # whom a node names
        self.asked: list[tuple[PeerID, int]] = []  # in turn, and how many records were known
        table = SimpleNamespace(
            get_nearest_neighbors=lambda key, *_, **__: [(place(at), it) for at, it in self.near.items()],
            uid_to_peer_id={place(at): it for at, it in near.items()},
        )
        storage = SimpleNamespace(get=lambda key: None)
        protocol = SimpleNamespace(routing_table=table, storage=storage, client_mode=client)
        self.blacklist = SimpleNamespace(ban_counter=Counter[PeerID]())
        self.dht: Any = SimpleNamespace(
            protocol=protocol,
            node_id=place(2 * NEAR),
            peer_id=ME,
            blacklist=self.blacklist,
            _call_find_with_blacklist=self._find,
        )

    async def _find(self, peer: PeerID, keys: list[DHTID]) -> Any:
        known = SAID.get()
        assert known is not None
        self.asked.append((peer, len(known.fingerprints) // FINGERPRINT_BYTES))
        await asyncio.sleep(TIMEOUT if peer in self.silent else self.slow.get(peer, 0.01))
        if peer in self.silent:
            return None
        until = clock.unix() + 30.0
        rows = {it: (MSGPackSerializer.dumps(it), until) for it in self.held.get(peer, ())}
        found = ValueWithExpiration(rows, until) if rows else None
        return {keys[0]: (found, {place(at): it for at, it in self.names.get(peer, {}).items()})}

    def read(self, *anchors: PeerID, asked: int = 2) -> tuple[list[PeerID], set[str], float]:
        """The nodes, the records and the seconds that it took."""

        async def look() -> tuple[list[PeerID], set[str], float]:
            began, held = clock.monotonic(), dict[str, search.Held]()
            nodes = await search.read(self.dht, KEY, held, asked, anchors)
            return nodes, set(held), clock.monotonic() - began

        return run(look())


@pytest.fixture
def net() -> Net:
    """Five nodes know one record, and the anchors a second one."""
    net = Net({number: node(number) for number in range(1, COPIES + 1)}, client=True)
    net.held = {it: ["a"] for it in net.near.values()} | {node(7): ["a", "b"], node(8): ["b"]}
    return net


def test_an_anchor_is_asked_last_for_what_the_nearest_do_not_have(net: Net) -> None:
    nodes, held, _ = net.read(node(7), node(8))
    assert held == {"a", "b"} and nodes == [*net.near.values(), node(7), node(8)]
    assert [known for _, known in net.asked] == [0, 1, 1] and net.asked[-1][0] in (node(7), node(8))


def test_a_newcomer_asks_all_anchors_and_one_that_is_near_is_asked_once(net: Net) -> None:
    net.read(node(7), node(8), node(1), asked=COPIES)
    assert sorted(it.to_bytes() for it, _ in net.asked) == [node(it).to_bytes() for it in (1, 2, 3, 4, 5, 7, 8)]
    net.asked.clear()
    net.near = {1: node(1), 2: node(2)}
    nodes, _, _ = net.read(node(1))
    assert len(net.asked) == 2 and nodes == [node(1), node(2)]


def test_a_silent_anchor_is_left_out_and_another_one_is_asked(net: Net) -> None:
    net.silent = {node(8)}
    for _ in range(8):  # in any order
        nodes, held, _ = net.read(node(7), node(8))
        assert held == {"a", "b"} and node(7) in nodes
        assert node(8) not in nodes or node(8) not in [it for it, _ in net.asked]
        net.asked.clear()


def test_this_node_is_an_anchor_of_its_own_record_and_asks_itself_nothing(net: Net) -> None:
    nodes, _, _ = net.read(ME)
    assert nodes == [*net.near.values(), ME] and ME not in [it for it, _ in net.asked]


def test_nobody_but_this_node_keeps_a_key_when_nobody_answers(net: Net) -> None:
    net.silent = {*net.near.values(), node(7), node(8)}
    assert net.read(ME, node(7), node(8))[0] == [ME]
    net.dht.protocol.client_mode = False
    assert net.read()[0] == [ME]


@pytest.mark.parametrize("answer", [True, False])
def test_nodes_that_are_slow_on_purpose_leave_time_for_the_anchor(net: Net, answer: bool) -> None:
    """Each names nearer ones, which answer just in time or never. The time of a look was over before an honest one was
    asked.
    """
    far = {number: node(number) for number in range(NEAR, NEAR - 60, -1)}
    net.near = {NEAR: node(NEAR), NEAR - 1: node(NEAR - 1)}
    net.slow, net.held = dict.fromkeys(far.values(), 1.9), {node(7): ["a"]}
    net.silent = set() if answer else set(far.values())
    net.names = {it: {n: far[n] for n in (number - 1, number - 2) if n in far} for number, it in far.items()}
    nodes, held, seconds = net.read(node(7))
    assert held == {"a"} and node(7) in nodes and seconds < NEAR_SECONDS + TIMEOUT
    if answer:  # without anchors a node keeps what it has found, and writes to those that answer
        assert net.read()[2] < ANSWERED_SECONDS + TIMEOUT


def address(it: PeerID) -> str:
    return f"/ip4/203.0.113.7/tcp/31337/p2p/{it.to_base58()}"


def test_the_anchors_are_the_initial_peers_that_answer_or_those_with_which_a_swap_succeeded() -> None:
    net, proven = Net({number: node(number) for number in range(10)}), Proven()
    for number in (3, 4, 5, 77):  # the DHT does not know the last one: it cannot be dialled
        proven.add(node(number).to_base58())
    initial = [address(node(number)) for number in range(20, 26)]
    own = anchors_of(net.dht, [address(ME), *initial], proven)
    assert own == [ME, *(node(20 + number) for number in range(MOST_INITIAL))]
    net.blacklist.ban_counter.update({node(number): 1 for number in range(20, 25)})
    assert anchors_of(net.dht, initial, proven) == [ME, node(25)]
    net.blacklist.ban_counter.update({node(25): 1, node(4): 1})
    net.dht.protocol.client_mode = True
    assert anchors_of(net.dht, initial, proven) == [node(5), node(3)][:MOST_PROVEN]
    assert anchors_of(net.dht, [], Proven()) == []
