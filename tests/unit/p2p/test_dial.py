"""Initial peers that do not answer: a peer says so in one line, however many they are, and whether to try again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer import clock
from peer.errors import RunError, UserError
from peer.p2p.dht import join
from peer.p2p.dht.authors import Author
from peer.p2p.dial import parsed_id
from peer.p2p.node import HEARD_SECONDS, Node
from peer.p2p.settings import NodeSettings
from tests.unit.virtual import stream_pair, virtual_time

ID, RELAY = "QmYbAnMcVeRLg6kmQ1Z4XT2Q4aBH3VTsd3GRYc7HZoFSer", "QmU78RESRuXXnTEmLEhFbSMpyeyDGnNj9vXPLXG1AN69kf"


async def silent(*_: Any) -> None:
    await asyncio.sleep(1e6)


async def another(*_: Any) -> None:
    raise OSError(f"failed to dial {ID}: peer id mismatch")


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_search_for_silent_initial_peers_ends_before_its_caller_does(count: int) -> None:
    """It was an error of the configuration: systemd gave a peer up whose bootstrap node was away when it booted."""
    addresses = tuple(f"/ip4/10.0.0.{number}/tcp/31337/p2p/{ID}" for number in range(1, count + 1))
    with virtual_time():
        node = Node(NodeSettings(None, "10.0.0.9", 0, initial_peers=addresses))
        node._p2p = SimpleNamespace(_client=SimpleNamespace(connect=silent))  # type: ignore[assignment]
        with pytest.raises(RunError, match=r"cannot reach any initial peer.*no answer within 10 s"):
            node.connect()
        node.close()


@pytest.mark.parametrize(
    ("address", "says"),
    [(f"/ip4/10.0.0.1/tcp/31337/p2p/{ID}", "peer id mismatch"), ("10.0.0.1:31337", "is not an address")],
)
def test_an_address_that_no_restart_mends_is_an_error_of_the_configuration(address: str, says: str) -> None:
    with virtual_time():
        node = Node(NodeSettings(None, "10.0.0.9", 0, initial_peers=(address,)))
        node._p2p = SimpleNamespace(_client=SimpleNamespace(connect=another))  # type: ignore[assignment]
        with pytest.raises(UserError, match=says):
            node.connect()
        node.close()


@pytest.mark.parametrize(
    ("said", "refused", "kind"),
    [
        ("local: 1010.0, peer: 1000.0", "", RunError),
        ("could not ping any of the initial peers", "", RunError),
        ("could not ping any of the initial peers", "the invitation was revoked", UserError),
    ],
)
def test_a_dht_that_may_answer_after_a_restart_is_no_error_of_the_configuration(
    said: str, refused: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong clock at boot, before NTP, was one: systemd gave the peer up."""

    async def create(*_: Any, **__: Any) -> None:
        raise ValueError(said)

    async def why(*_: Any) -> str:
        return refused

    monkeypatch.setattr(join.DHTNode, "create", create)
    monkeypatch.setattr(join, "_why_refused", why)
    p2p, author = SimpleNamespace(peer_id=parsed_id(ID)), cast(Author, SimpleNamespace(validator=None))
    with pytest.raises(kind, match=refused or "clock is 10.0 s ahead of|its DHT does not answer"):
        asyncio.run(join.join_dht(cast(Any, p2p), [f"/ip4/10.0.0.1/tcp/1/p2p/{ID}"], author, client=False))


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
        stream.bulk = None
        with stream.transferring():  # a donor only sends, a partner with slow steps is silent for as long as one
            await look()
        stream.origin = f"/ip4/45.1.2.3/tcp/1/p2p/{RELAY}/p2p-circuit"
        await two.write(bytes(10), 1)
        await stream.read_into(memoryview(bytearray(10)), 1)
        node.hang_up(RELAY)  # with it the circuit would break
        stream.close()
        await look()
        return counts

    with virtual_time():
        node = Node(NodeSettings(None, "10.0.0.9", 0))
        node._p2p = SimpleNamespace(_client=SimpleNamespace(disconnect=disconnect))  # type: ignore[assignment]
        assert node.call(talk(node), 60) == [1, 1, 2, 2, 2, 3] and RELAY not in closed
        node.close()
