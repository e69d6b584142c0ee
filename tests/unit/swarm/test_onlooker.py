"""Who looks at all runs: anybody can write names of runs, invent their members, and own the nodes that keep them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from peer import clock
from peer.p2p.dht.search import id_of
from peer.swarm.directory import records
from peer.swarm.directory.likely_runs import likeliest, networks_of
from peer.swarm.directory.reader import RUN_TIMEOUT, WATCHED_RUNS, Entry, Onlooker
from tests.unit.parts import member_record

SLOW = 30.0  # seconds
OTHER = DHTID.generate(source="other")


class Directory:
    """A DHT with one other node. ``members``: ids by run; ``slow``: runs about which it answers after ``SLOW``."""

    def __init__(self, **members: list[str]) -> None:
        self.members, self.slow = dict(members), set[str]()
        self.addresses: dict[str, str] = {}  # of the connected peers, by id
        table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: [(OTHER, "QmOther")])
        protocol = SimpleNamespace(routing_table=table, storage=SimpleNamespace(get=lambda key: None), client_mode=True)
        dht = SimpleNamespace(
            protocol=protocol, node_id=DHTID.generate(source="me"), peer_id="QmMe", _call_find_with_blacklist=self._find
        )
        p2p = SimpleNamespace(list_peers=self._connected)
        node: Any = SimpleNamespace(dht=dht, peer_id="QmMe", anchors=list, p2p=p2p)
        self.onlooker = Onlooker(node)

    async def look(self) -> Mapping[str, Mapping[str, Entry]]:
        await asyncio.sleep(2.0)
        return await self.onlooker.look()

    async def _find(self, _: Any, keys: list[DHTID]) -> dict[DHTID, Any]:
        (key,) = keys
        run = next((it for it in self.members if key == id_of(f"{it}/members/0/0")), "")
        if run in self.slow:
            await asyncio.sleep(SLOW)
        texts = {peer_id: records.encode(member_record(peer_id)) for peer_id in self.members.get(run, ())}
        if key == id_of(records.RUNS):
            texts = {it: it for it in self.members}
        until = clock.unix() + records.LIFETIME
        packed = {subkey: (MSGPackSerializer.dumps(text), until) for subkey, text in texts.items()}
        return {key: (ValueWithExpiration(packed, until) if packed else None, {})}

    async def _connected(self) -> list[Any]:
        return [SimpleNamespace(peer_id=peer_id, addrs=[it]) for peer_id, it in self.addresses.items()]


@pytest.mark.parametrize("known", [False, True])
async def test_a_run_whose_nodes_are_slow_costs_the_others_nothing(known: bool) -> None:
    """Six such runs took 23 s, one after the other: /targets answered 503, and join and status ended."""
    invented = [f"run{number}" for number in range(6)]
    directory = Directory(demo=["QmA", "QmB"], **{run: [f"Qm{run.replace('0', 'x')}"] for run in invented})
    if known:
        await directory.look()
    directory.slow = set(invented)
    began = clock.monotonic()
    found, seconds = set(await directory.onlooker.look()), clock.monotonic() - began
    assert found == ({"demo", *invented} if known else {"demo"})  # what is known of a run stays until it expires
    assert seconds == pytest.approx(RUN_TIMEOUT, abs=0.1)


async def test_a_directory_that_answers_for_no_run_is_a_failure() -> None:
    """Else all members would be lost, and not the directory."""
    directory = Directory(demo=["QmA"], other=["QmB"])
    await directory.look()
    directory.slow, directory.members["new"] = {"demo", "other"}, []
    with pytest.raises(TimeoutError):
        await directory.look()
    directory.slow = set()
    assert set(await directory.look()) == {"demo", "other"}


@pytest.mark.parametrize("each", [0, 1, 9])
async def test_a_run_that_begins_after_many_invented_ones_is_shown_and_stays(each: int) -> None:
    """A run with a member was never replaced. ``each``: ids of an invented run; without, one id is in all of them."""
    invented = {
        f"run{number}": ["Qm" + "x" * number + "y" * it for it in range(each)] or ["QmEach"]
        for number in range(WATCHED_RUNS + 10)
    }
    directory = Directory(**invented)
    directory.addresses = {it: "/ip4/203.0.113.9/tcp/1" for ids in invented.values() for it in ids}
    assert len(await directory.look()) == WATCHED_RUNS
    directory.members["demo"] = ["QmA", "QmB"]
    directory.addresses |= {"QmA": "/ip4/198.51.100.4/tcp/9", "QmB": "/ip4/192.0.2.7/tcp/9"}
    looks = [await directory.look() for _ in range(80)]
    assert all(len(it) == WATCHED_RUNS for it in looks)
    shown = ["demo" in it for it in looks]
    assert all(shown[60:]) and shown == sorted(shown)


async def test_a_swarm_in_one_network_keeps_its_place_when_one_address_invents_larger_ones() -> None:
    directory = Directory(demo=[f"QmDemo{it}" for it in "abcdefgh"])
    directory.addresses = {it: f"/ip4/198.51.100.4/tcp/{it.encode()[-1]}" for it in directory.members["demo"]}
    looks = [await directory.look()]
    for number in range(WATCHED_RUNS + 10):
        directory.members[f"run{number}"] = ids = ["Qm" + "x" * number + "y" * it for it in range(9)]
        directory.addresses |= dict.fromkeys(ids, "/ip4/203.0.113.9/tcp/1")
    looks += [await directory.look() for _ in range(40)]
    assert all(len(it) == WATCHED_RUNS for it in looks[1:])
    assert all("demo" in it for it in looks)


async def test_the_name_of_a_run_without_members_takes_no_place() -> None:
    directory = Directory(**{f"run{number}": [] for number in range(100)})
    assert not await directory.look()
    directory.members = {"demo": ["QmA"], **directory.members}
    found = [set(await directory.look()) for _ in range(300)]
    assert found[-1] == {"demo"}


def test_many_networks_count_more_than_many_ids_and_an_id_counts_once() -> None:
    networks = {"a": ["1"], "b": ["2"], "c": ["3"], "x": ["4", "5", "6"]}
    runs = {"crowd": ["q", "r", "s", "t"], "ab": ["a", "b", "x"], "one": ["c"], "copy": ["x"]}
    assert likeliest(runs, networks, 3) == ["ab", "one", "crowd"]
    assert likeliest(runs, {}, 1) == ["crowd"]
    assert likeliest({"first": ["a"], "second": ["b"]}, {}, 1) == ["first"]
    assert likeliest(runs, networks, 3, {"copy", "one"}) == ["ab", "one", "copy"]


def test_the_network_of_an_address() -> None:
    relay = PeerID(b"\x12\x20" + bytes(32)).to_base58()
    through = f"/ip4/203.0.113.9/tcp/1/p2p/{relay}/p2p-circuit"
    assert networks_of([through, "/dns4/example.org/tcp/1"]) == set()
    assert networks_of(["/ip4/203.0.113.9/tcp/1", "/ip4/203.0.7.9/tcp/2"]) == {"203.0.0.0/16"}
    assert networks_of(["/ip6/2001:db8:7::1/tcp/1"]) == {"2001:db8::/32"}
