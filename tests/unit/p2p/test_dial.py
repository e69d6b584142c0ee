"""Initial peers that do not answer: a peer says so in one line, however many they are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer.errors import UserError
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from tests.unit.virtual import virtual_time

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
