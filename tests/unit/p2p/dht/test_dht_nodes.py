"""Nodes of hivemind's DHT with our checks around them, in one process: what one attacker writes hides no other's."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.proto.dht_pb2 import FindRequest, FindResponse, FindResult, StoreRequest, StoreResponse
from hivemind.utils import MSGPackSerializer

from peer.p2p import identity
from peer.p2p.dht import search
from peer.p2p.dht.authors import Author
from peer.p2p.dht.join import join_dht
from peer.p2p.dht.requests import LONGEST_ANSWER, CheckedP2P, RefusedRequest, Requests
from peer.p2p.dht.search import Held, id_of
from peer.rounds.backoff import Proven

RUN = "demo/members/0/0"
KEY = id_of(RUN).to_bytes()


class Wire(P2P):
    """Instead of a daemon: messages go to the handlers of the other nodes, packed. ``everyone``: by id."""

    def __init__(self, peer_id: PeerID, everyone: dict[PeerID, Wire]) -> None:
        self.peer_id, self._everyone = peer_id, everyone
        self._handlers = dict[str, tuple[Callable[..., Awaitable[Any]], Any]]()
        everyone[peer_id] = self

    def __del__(self) -> None:
        """There is no daemon to be ended."""

    async def add_protobuf_handler(self, name: str, handler: Any, input_protobuf_type: Any, **_: Any) -> None:
        self._handlers[name] = handler, input_protobuf_type

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, input: Any, output_protobuf_type: Any) -> Any:
        handler, kind = self._everyone[peer_id]._handlers[name]
        answer = await handler(kind.FromString(input.SerializeToString()), SimpleNamespace(remote_id=self.peer_id))
        return output_protobuf_type.FromString(answer.SerializeToString())


class CheckedWire(CheckedP2P, Wire):
    """The checks are the product's."""


class Peer:
    """One node of an open swarm."""

    dht: DHTNode

    def __init__(self, key: Path, everyone: dict[PeerID, Wire]) -> None:
        self.peer_id = PeerID.from_base58(identity.load_or_create(key))
        self.author = Author(key)
        self.subkey = self.peer_id.to_base58() + self.author.tag
        self.p2p = CheckedWire(self.peer_id, everyone)
        self.p2p.requests = Requests(self.author, Proven())

    async def join(self, *others: Peer) -> None:
        self.dht = await join_dht(self.p2p, [f"/p2p/{it.peer_id}" for it in others], self.author, client=False)

    async def read(self) -> set[str]:
        """The subkeys that it finds."""
        held = dict[str, Held]()
        await search.read(self.dht, RUN, held)
        return set(held)

    def signed(self, subkey: bytes, expires: float) -> bytes:
        return self.author.validator.sign_value(DHTRecord(KEY, subkey, b"\xa2{}", expires))

    async def store(self, node: Peer, subkey: bytes) -> bool:
        """A record under a packed subkey. Raises why the node refuses it."""
        expires = time.time() + 30
        request = StoreRequest(keys=[KEY], subkeys=[subkey], values=[self.signed(subkey, expires)], in_cache=[False])
        request.expiration_time.append(expires)
        answer = await self.p2p.call_protobuf_handler(node.peer_id, "DHTProtocol.rpc_store", request, StoreResponse)
        return bool(answer.store_ok[0])


@pytest.fixture
def new_peer(tmp_path: Path) -> Callable[[str], Peer]:
    everyone = dict[PeerID, Wire]()
    return lambda name: Peer(tmp_path / name, everyone)


@pytest.mark.real_time
async def test_a_subkey_that_is_packed_in_another_way_hides_no_record(new_peer: Callable[[str], Peer]) -> None:
    """A node kept its text, and who read it packed that as hivemind does: the signature was false, and for one false
    record hivemind drops all. One attacker hid a run from all newcomers.
    """
    node, member, attacker, newcomer = map(new_peer, ("node", "member", "attacker", "newcomer"))
    text = attacker.subkey.encode()
    await node.join()
    await newcomer.join(node)
    assert await member.store(node, MSGPackSerializer.dumps(member.subkey))
    with pytest.raises(RefusedRequest, match="from its author"):
        await attacker.store(node, b"\xdb" + len(text).to_bytes(4, "big") + text)
    assert (await newcomer.read()) == {member.subkey}


@pytest.mark.real_time
async def test_a_false_record_hides_no_other(new_peer: Callable[[str], Peer]) -> None:
    """A node may keep what is not valid for all: too late by one clock, or revoked for one."""
    node, member, stranger, newcomer = map(new_peer, ("node", "member", "stranger", "newcomer"))
    await node.join()
    await newcomer.join(node)
    assert await member.store(node, MSGPackSerializer.dumps(member.subkey))
    for owner, lasts in ((stranger, 120), (node, 30)):  # too late, and not signed by its owner
        expires = time.time() + lasts
        value = stranger.signed(MSGPackSerializer.dumps(owner.subkey), expires)
        node.dht.protocol.storage.store_subkey(id_of(RUN), owner.subkey, value, expires)
    assert (await newcomer.read()) == {member.subkey}


@pytest.mark.real_time
async def test_a_node_whose_answers_are_too_long_is_silent(new_peer: Callable[[str], Peer]) -> None:
    """It is asked once, and then no more for a while: each of its answers costs a download."""
    node, liar, member, newcomer = map(new_peer, ("node", "liar", "member", "newcomer"))
    asked: list[None] = []

    async def lie(*_: Any) -> FindResponse:
        asked.append(None)
        return FindResponse(results=[FindResult(value=bytes(LONGEST_ANSWER))])

    await node.join()
    await newcomer.join(node)
    newcomer.dht.blacklist.base_time = math.inf  # as long as the test may take
    liar.p2p.requests.count_answer = lambda *_: None  # type: ignore[method-assign]
    await liar.join(newcomer)
    liar.p2p._handlers["DHTProtocol.rpc_find"] = lie, FindRequest
    assert await member.store(node, MSGPackSerializer.dumps(member.subkey))
    known = newcomer.dht.protocol.routing_table.peer_id_to_uid
    assert liar.peer_id in known
    seen = [await newcomer.read() for _ in range(5)]
    await asyncio.sleep(0)  # a task of hivemind's takes it out; from Python 3.12 on no read has let it run
    assert liar.peer_id in newcomer.dht.blacklist and liar.peer_id not in known
    assert seen == [{member.subkey}] * 5 and len(asked) == 1
