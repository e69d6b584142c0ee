"""Reads and writes the records under a key at the nodes nearest to it, with few requests and few bytes.

hivemind asks eight nodes for all that they have, for a look as for a write. Here a look asks some of the nodes that
keep the key, at random, and says which records it has: the answer has the others only (requests.py). Each of these
nodes should have all records; what one does not have, or does not tell, another one tells at one of the next looks.
Whoever owns all of them hides a key from who has no anchors (anchors.py): these are asked last, so that they have
little to tell.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from peer import clock
from peer.p2p.dht.limits import split_text

COPIES = 5  # nodes nearest to a key that keep its records
ASKED_NODES = 2  # of them, at random, for one look
NEIGHBOURS = 8  # nodes in an answer; a node should know as many
FIRST_NODES = 20  # nodes from which a search starts
MOST_ASKED = 32  # nodes of one search
# after which the nearest are asked no more, where there are anchors; where one has answered: some are slow on purpose
NEAR_SECONDS, ANSWERED_SECONDS = 1.0, 3.0
KNOWN_RECORDS = 256  # that a request names at most
FINGERPRINT_BYTES = 8


class Held(NamedTuple):
    """The text of a record that has been checked; ``expires`` in unix seconds of its author's clock."""

    text: str
    expires: float


class Known(NamedTuple):
    """What an answer may leave out: the records with these ``fingerprints``, or all."""

    fingerprints: bytes = b""
    everything: bool = False


# what the next request says of the records that it does not need; nothing, where hivemind asks by itself
SAID: ContextVar[Known | None] = ContextVar("known records", default=None)


@lru_cache(2**16)
def fingerprint(key: bytes, subkey: str, expires: float) -> bytes:
    """Of a record: a newer one of the same author expires later."""
    text = key + struct.pack(">d", expires) + subkey.encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=FINGERPRINT_BYTES).digest()


@lru_cache(1024)
def id_of(key: str) -> DHTID:
    """Where a key stands in the DHT."""
    return DHTID.generate(source=key)


async def read(
    dht: DHTNode, key: str, held: dict[str, Held], asked: int = ASKED_NODES, anchors: Sequence[PeerID] = ()
) -> list[PeerID]:
    """Bring ``held``, the records under ``key`` by subkey, up to date at ``asked`` nodes and one of the ``anchors``; at
    all of these when more than usual are asked. Returns the nodes that keep the key, nearest first, this one among
    them, and the anchors. No other is among them when none has answered.
    """
    own = dht.protocol.storage.get(id_of(key))
    if own is not None:
        _take(held, own.value)
    others = [it for it in anchors if it != dht.peer_id]
    nearest, heard = await _search(dht, id_of(key), held, asked, bool(others))
    count, silent = len(others) if asked > ASKED_NODES else 1, set[PeerID]()
    if count > 1 or heard.isdisjoint(others):
        silent = await _ask_some(dht, [it for it in others if it not in heard], id_of(key), held, count)
    alone = not heard and silent.issuperset(others)
    nodes = dict.fromkeys([*nearest, *(it for it in anchors if it not in silent)])
    return [it for it in nodes if it == dht.peer_id or not alone]


async def keepers(dht: DHTNode, key: str, anchors: Sequence[PeerID] = ()) -> list[PeerID]:
    """The nodes that keep a key, nearest first, this one among them, and the ``anchors``, which are not asked."""
    nearest, _ = await _search(dht, id_of(key), None, ASKED_NODES, any(it != dht.peer_id for it in anchors))
    return list(dict.fromkeys([*nearest, *anchors]))


async def _search(
    dht: DHTNode, key: DHTID, held: dict[str, Held] | None, count: int, others: bool
) -> tuple[list[PeerID], set[PeerID]]:
    """Ask random nodes of the nearest until ``count`` of those that are the nearest then have answered. Returns the
    nearest, and who has answered. ``others``: there are others to ask.
    """
    table = dht.protocol.routing_table
    near = dict(table.get_nearest_neighbors(key, FIRST_NODES, exclude=dht.node_id))
    answered: dict[DHTID, bool] = {}
    began = clock.monotonic()
    while True:
        nearest = sorted((it for it in near if answered.get(it, True)), key=key.__xor__)[:COPIES]
        left = [it for it in nearest if it not in answered]
        wanted = count - (len(nearest) - len(left))
        passed = clock.monotonic() - began
        late = (others and passed > NEAR_SECONDS) or (any(answered.values()) and passed > ANSWERED_SECONDS)
        if not left or wanted <= 0 or late or len(answered) >= MOST_ASKED:
            break
        # one after the other, as each has what the last one has told; at once when one was silent, which costs seconds
        nodes = random.sample(left, 1 if all(answered.values()) else min(wanted, len(left)))
        questions = [_ask(dht, near[node], key, held) for node in nodes]
        answers = [await questions[0]] if len(nodes) == 1 else await asyncio.gather(*questions)
        for node, answer in zip(nodes, answers, strict=True):
            answered[node] = answer is not None
            if answer is not None:
                near |= {place: it for place, it in answer[1].items() if place != dht.node_id}
                if held is not None and answer[0] is not None:
                    _take(held, answer[0].value)
    heard = {near[it] for it, it_answers in answered.items() if it_answers}
    if not dht.protocol.client_mode:
        nearest = sorted([*nearest, dht.node_id], key=key.__xor__)[:COPIES]
    return [near.get(it, dht.peer_id) for it in nearest], heard


async def _ask_some(
    dht: DHTNode, nodes: Sequence[PeerID], key: DHTID, held: dict[str, Held], count: int
) -> set[PeerID]:
    """Ask ``count`` of these nodes, at random, and the others when none of them answers; returns those that do not."""
    silent, nodes = set[PeerID](), random.sample(nodes, len(nodes))
    for some in (nodes[:count], nodes[count:]):
        answers = await asyncio.gather(*(_ask(dht, node, key, held) for node in some))
        for answer in answers:
            if answer is not None and answer[0] is not None:
                _take(held, answer[0].value)
        silent |= {node for node, answer in zip(some, answers, strict=True) if answer is None}
        if len(silent) < len(some):
            break
    return silent


async def _ask(dht: DHTNode, node: PeerID, key: DHTID, held: Mapping[str, Held] | None) -> Any:
    """The node's records, without those in ``held`` (``None``: without any), and the nodes that it names."""
    known = Known(everything=True) if held is None else Known(_fingerprints(key.to_bytes(), held))
    before = SAID.set(known)
    try:
        answers = await dht._call_find_with_blacklist(node, [key])
    finally:
        SAID.reset(before)
    return None if answers is None else answers[key]


def _fingerprints(key: bytes, held: Mapping[str, Held]) -> bytes:
    newest = sorted(((it.expires, subkey) for subkey, it in held.items()), reverse=True)[:KNOWN_RECORDS]
    return b"".join(fingerprint(key, subkey, expires) for expires, subkey in newest)


def _take(held: dict[str, Held], records: Any) -> None:
    """hivemind has checked these records and their signatures."""
    if not hasattr(records, "items"):
        return
    now = clock.unix()
    for subkey, (value, expires) in records.items():
        if expires > now and (subkey not in held or held[subkey].expires < expires):
            text = split_text(value)[0]
            if text is not None:
                held[subkey] = Held(text, expires)


async def write(dht: DHTNode, key: str, subkey: str, record: Held, nodes: Iterable[PeerID]) -> set[PeerID]:
    """Store this peer's record at these nodes; returns those that have answered."""
    place, protocol = id_of(key), dht.protocol
    unsigned = DHTRecord(
        place.to_bytes(), protocol.serializer.dumps(subkey), protocol.serializer.dumps(record.text), record.expires
    )
    value = protocol.record_validator.sign_value(unsigned)

    async def store(node: PeerID) -> bool:
        if node == dht.peer_id:
            protocol.storage.store_subkey(place, subkey, value, record.expires)
            return True
        answer = await protocol.call_store(node, [place], [value], [record.expires], [subkey])
        return answer is not None

    nodes = list(nodes)
    done = await asyncio.gather(*map(store, nodes))
    return {node for node, stored in zip(nodes, done, strict=True) if stored}
