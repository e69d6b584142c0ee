"""Members know each other by themselves: the node through which they joined may end at any time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peer import clock
from peer.p2p.dht.join import Touch, become_client, get_in_touch, neighbours
from peer.p2p.dht.whereabouts import Whereabouts
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from tests.swarm.support.harness import wait_for
from tests.swarm.support.node_peer import Peer


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, *initial: str) -> Node:
    node = Node(NodeSettings(None, "127.0.0.1", 0, initial_peers=initial))
    stack.callback(node.stop)
    node.start()
    return node


def test_who_joins_learns_where_all_others_are_even_those_that_have_just_come(stack: ExitStack) -> None:
    nodes = [start(stack)]
    for _ in range(4):
        nodes.append(start(stack, *nodes[0].addresses))
        assert neighbours(nodes[-1].dht) == {it.peer_id for it in nodes[:-1]}


def test_a_node_that_becomes_a_client_is_added_to_no_table_until_it_is_none_any_more(stack: ExitStack) -> None:
    server = start(stack)
    node = start(stack, *server.addresses)
    assert neighbours(server.dht) == {node.peer_id}
    become_client(node.dht)
    server.call(forget(server, node.peer_id), 10)
    assert node.call(get_in_touch(node.p2p, node.dht, server.peer_id, server.addresses), 10) is Touch.ANSWERS
    assert neighbours(server.dht) == set() and neighbours(node.dht) == {server.peer_id}
    become_client(node.dht, False)
    assert node.call(get_in_touch(node.p2p, node.dht, server.peer_id, server.addresses), 10) is Touch.ANSWERS
    assert neighbours(server.dht) == {node.peer_id}


async def forget(node: Node, peer_id: str) -> None:
    """As after a request without an answer."""
    table = node.dht.protocol.routing_table
    del table[next(place for place, other in table.uid_to_peer_id.items() if str(other) == peer_id)]


def test_members_that_found_each_other_in_the_directory_alone_outlive_the_node_that_held_it(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(Whereabouts, "_closest", nobody)
    bootstrap = start(stack)
    peers = [Peer(name, tmp_path, bootstrap.addresses) for name in "ab"]
    for peer in peers:
        stack.callback(peer.presence.leave)
        assert neighbours(peer.node.dht) == {bootstrap.peer_id}
    for peer in peers:
        wait_for(lambda peer=peer: len(neighbours(peer.node.dht)) == 2, 30)  # type: ignore[misc]
    bootstrap.stop()
    ended = clock.unix()
    for peer in peers:
        wait_for(lambda peer=peer: peer.presence.others(since=ended), 30)  # type: ignore[misc]
