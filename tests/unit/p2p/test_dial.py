"""Initial peers that do not answer: a peer says so in one line, however many they are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer import clock
from peer.errors import UserError
from peer.p2p.node import HEARD_SECONDS, Node
from peer.p2p.settings import NodeSettings
from tests.unit.virtual import stream_pair, virtual_time

ID = "QmYbAnMcVeRLg6kmQ1Z4XT2Q4aBH3VTsd3GRYc7HZoFSer"


async def silent(*_: Any) -> None:
    await asyncio.sleep(1e6)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_search_for_silent_initial_peers_ends_before_its_caller_does(count: int) -> None:
    addresses = tuple(f"/ip4/10.0.0.{number}/tcp/31337/p2p/{ID}" for number in range(1, count + 1))
    with virtual_time():
        node = Node(NodeSettings(None, "10.0.0.9", 0, initial_peers=addresses))
        node._p2p = SimpleNamespace(_client=SimpleNamespace(connect=silent))  # type: ignore[assignment]
        with pytest.raises(UserError, match=r"cannot reach any initial peer.*no answer within 10 s"):
            node.connect()
        node.close()


def test_a_connection_on_which_something_comes_is_not_closed() -> None:
    """Who waited for an answer behind a swap closed the connection, and the swap with it."""
    closed: list[str] = []

    async def disconnect(peer_id: Any) -> None:
        closed.append(peer_id.to_base58())

    async def talk(node: Node) -> list[int]:
        one, two = await stream_pair()
        stream = node._tracked(one.reader, one.writer, ID, "", initiator=False)
        counts = []

        async def look() -> None:
            node.hang_up(ID)
            await asyncio.sleep(0.1)
            counts.append(len(closed))

        await look()  # it is open, and nothing has come yet
        await two.write(bytes(10), 1)
        await stream.read_into(memoryview(bytearray(10)), 1)
        await look()
        await asyncio.sleep(HEARD_SECONDS)
        await look()
        stream.bulk = SimpleNamespace(heard=clock.monotonic(), close=bool)  # type: ignore[assignment]
        await look()
        stream.close()
        await look()
        return counts

    with virtual_time():
        node = Node(NodeSettings(None, "10.0.0.9", 0))
        node._p2p = SimpleNamespace(_client=SimpleNamespace(disconnect=disconnect))  # type: ignore[assignment]
        assert node.call(talk(node), 60) == [1, 1, 2, 2, 3]
        node.close()
