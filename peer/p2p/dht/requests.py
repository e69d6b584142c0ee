"""Each request to the DHT and each answer of it, before hivemind sees them.

libp2p has proved who is at the other end of a connection. So a request counts as that id's: by its budget (budgets.py),
by the certificate in it where the swarm is for invited peers, and by its place in the DHT, which is the hash of the id.
A record is taken from its author only, and as many as a node keeps. An answer is checked in the same way, each record
in it by itself: for a single false one hivemind drops all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, islice, takewhile
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.proto.dht_pb2 import FOUND_DICTIONARY, NOT_FOUND, FindRequest, FindResponse, StoreRequest, StoreResponse
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from peer import clock
from peer.p2p.budgets import DHT_BYTES, DHT_REQUESTS, RECORDS, Spending
from peer.p2p.dht.authors import Author, owner_of_subkey
from peer.p2p.dht.limits import CLOCKS, RECORD, SUBKEY_BYTES, rows_of, subkey_text
from peer.p2p.dht.mended import calls_have_ended, mend_calls
from peer.p2p.dht.search import FINGERPRINT_BYTES, KNOWN_RECORDS, NEIGHBOURS, SAID, Known, fingerprint
from peer.p2p.identity import LONGEST_ID
from peer.p2p.protobuf import BYTES_FIELD, INT_FIELD, ONE, message_classes
from peer.rounds.backoff import Proven
from peer.rounds.types import Newest

KEYS = 8  # of one request; each counts as one, and as one more for so many records under it:
PACKED_RECORDS = 32  # for an answer a node packs and reads all of them, also those that it leaves out in the end
RECORDS_EACH = 64  # of one request
KEY_RECORDS = 256  # that a node keeps under one key; a bucket of the directory has about 24
KEY_RECORDS_EACH = 2  # of one author under one key: a new invitation is another subkey until the old record expires
READ_RECORDS = 2 * KEY_RECORDS  # of an answer under one key: proven authors may write under one that is full
ANSWER_BYTES = 256_000  # of one: it comes in time (join.DHT_TIMEOUT) at 1 Mbit/s; a full key has three times as much
LONGEST_ANSWER = ANSWER_BYTES + KEYS * 4096  # with one record of each key, which a node tells in any case
BUCKET_NODES = 20  # that hivemind names in an answer under one key
DICTIONARY_BYTES = 64  # of one without records, at most
PRUNE_SECONDS = 5.0  # between two looks for records that have expired
# a field that hivemind's FindRequest does not have, and that who does not know it skips
_KNOWN = message_classes(
    "noloco", {"Known": [("fingerprints", 15, BYTES_FIELD, ONE), ("everything", 16, INT_FIELD, ONE)]}
)["Known"]
SHOWN = 4096  # certificates


class RefusedRequest(Exception):
    """The text goes to the caller."""


def place_of_node(peer_id: PeerID) -> DHTID:
    """Where a node stands in the DHT: nobody can choose it."""
    return DHTID.generate(source=peer_id.to_bytes())


class Requests:
    """Checks those of one node."""

    def __init__(self, author: Author, proven: Proven) -> None:
        self._author, self._proven = author, proven
        self._requests, self._bytes = Spending(DHT_REQUESTS, proven), Spending(DHT_BYTES, proven)
        self._kept = _Kept(proven)
        self._shown = Newest[str](SHOWN)  # certificates by id

    def welcome(self, peer_id: str) -> bool:
        """Is it admitted, by the certificate that it has shown?"""
        return self._author.admits(peer_id, self._shown.get(peer_id, ""))

    def ours(self, message: Any) -> None:
        """Put our certificate into a request or an answer."""
        if self._author.certificate:
            token = "client_access_token" if hasattr(message.auth, "client_access_token") else "service_access_token"
            getattr(message.auth, token).username = self._author.certificate

    def check_request(self, request: Any, remote: PeerID) -> None:
        """Raises :class:`RefusedRequest`."""
        peer_id, keys = remote.to_base58(), request.keys if isinstance(request, FindRequest) else ()
        # one with more keys is refused, and has cost something all the same
        counted = sum(1 + self._kept.count(key) // PACKED_RECORDS for key in keys[:KEYS])
        if not self._requests.spend(peer_id, max(1, counted)) or not self._bytes.spend(peer_id, request.ByteSize()):
            raise RefusedRequest("too many requests")
        if len(keys) > KEYS or len(set(keys)) < len(keys):
            raise RefusedRequest(f"at most {KEYS} keys, each once")
        if not self._author.admits(peer_id, request.auth.client_access_token.username):
            raise RefusedRequest("not invited")
        if self._author.certificate:
            self._shown[peer_id] = request.auth.client_access_token.username
        if request.peer.node_id not in (b"", place_of_node(remote).to_bytes()):
            raise RefusedRequest("a node's place is the hash of its id")
        if isinstance(request, StoreRequest):
            self._check_records(request, peer_id)

    def _check_records(self, request: StoreRequest, peer_id: str) -> None:
        rows = list(zip(request.keys, request.subkeys, request.expiration_time, strict=False))
        sizes = {len(it) for it in (rows, request.keys, request.subkeys, request.values, request.in_cache)}
        if len(sizes) > 1 or len(rows) > RECORDS_EACH or any(request.in_cache):
            raise RefusedRequest(f"at most {RECORDS_EACH} records, none for a cache")
        for key, subkey, expires in rows:
            if subkey == DHTProtocol.IS_REGULAR_VALUE:
                continue
            if len(key) != DHTID.HASH_NBYTES or len(subkey) > SUBKEY_BYTES:  # both are remembered
                raise RefusedRequest("a key or subkey of another length")
            if owner_of_subkey(subkey_text(subkey)).peer_id != peer_id:
                raise RefusedRequest("a record is taken from its author")
            if not self._kept.room(key, peer_id, expires, subkey):
                raise RefusedRequest("too many records")

    def count_answer(self, answer: Any, remote: PeerID) -> None:
        """Our answer costs upload, as the request does: a long one is cut, so that the next one has room too. Raises
        :class:`RefusedRequest` when it is too much all the same, and it has cost what was left.
        """
        peer_id = remote.to_base58()
        left = self._bytes.left(peer_id)
        if isinstance(answer, FindResponse):
            fit(answer, min(ANSWER_BYTES, left / 2), self._proven)
        self._bytes.spend(peer_id, min(answer.ByteSize(), left))
        if answer.ByteSize() > left:
            raise RefusedRequest("too many bytes")

    def check_answer(self, request: Any, answer: Any, remote: PeerID) -> None:
        """Raises :class:`RefusedRequest`. Left out are nodes at a place that is not theirs, and records that are not
        valid: one may be too late by our clock, or of somebody whom the other one does not know to be revoked.
        """
        if answer.ByteSize() > LONGEST_ANSWER:
            raise RefusedRequest("the answer is too long")
        if not self._author.admits(remote.to_base58(), answer.auth.service_access_token.username):
            raise RefusedRequest("not invited")
        if answer.peer.node_id not in (b"", place_of_node(remote).to_bytes()):
            raise RefusedRequest("a node's place is the hash of its id")
        for key, result in zip(request.keys, answer.results, strict=False) if isinstance(answer, FindResponse) else ():
            if result.type == FOUND_DICTIONARY:
                _put(result, (row for row in islice(rows_of(result.value), READ_RECORDS) if self._valid(key, *row)))
            named = zip(result.nearest_node_ids[:BUCKET_NODES], result.nearest_peer_ids[:BUCKET_NODES], strict=False)
            short = ((place, node) for place, node in named if len(node) <= LONGEST_ID)  # base58 of a long one is slow
            true = [(place, node) for place, node in short if place_of_node(PeerID(node)).to_bytes() == place]
            result.nearest_node_ids[:] = [place for place, _ in true]
            result.nearest_peer_ids[:] = [node for _, node in true]

    def _valid(self, key: bytes, subkey: object, value: Any, expires: Any) -> bool:
        """hivemind asks again, and each signature is checked once (authors.py)."""
        packed = MSGPackSerializer.dumps(subkey) if isinstance(subkey, str) else b""
        return self._author.validator.validate(DHTRecord(key, packed, value, expires))


class _Kept:
    """Which records the node may keep: expirations by key, author and subkey.

    An author can write its subkey in many ways: its certificate is JSON, and its key may end with more padding. A
    proven author may write under a key that is full: a crowd of new ids may have filled it.
    """

    def __init__(self, proven: Proven) -> None:
        self._proven = proven
        self._by_key: dict[bytes, dict[tuple[str, bytes], float]] = {}
        self._by_author: Counter[str] = Counter()
        self._pruned = 0.0

    def room(self, key: bytes, author: str, expires: float, subkey: bytes = b"") -> bool:
        """Is there room for this record? Then it counts from now on."""
        self._prune()
        under, record = self._by_key.get(key, {}), (author, subkey)
        if record not in under:
            same = sum(it == author for it, _ in under)
            if same >= KEY_RECORDS_EACH or self._by_author[author] >= RECORDS.each:
                return False
            full = len(under) >= KEY_RECORDS or self._by_author.total() >= RECORDS.all
            if full and author not in self._proven:
                return False
            self._by_author[author] += 1
        latest = min(expires, clock.unix() + RECORD.lifetime + CLOCKS)
        self._by_key.setdefault(key, {})[record] = latest
        return True

    def count(self, key: bytes) -> int:
        """Records under a key."""
        self._prune()
        return len(self._by_key.get(key, ()))

    def _prune(self) -> None:
        if clock.monotonic() < self._pruned + PRUNE_SECONDS:
            return
        self._pruned, now = clock.monotonic(), clock.unix()
        live = {key: {it: end for it, end in held.items() if end > now} for key, held in self._by_key.items()}
        self._by_key = {key: held for key, held in live.items() if held}
        self._by_author = Counter(author for author, _ in chain.from_iterable(self._by_key.values()))


def _put(result: Any, rows: Iterable[Sequence[Any]]) -> None:
    """These records, as of :func:`rows_of`, are what is found."""
    left = DictionaryDHTValue()
    for row in rows:
        left.store(*row)
    result.value = MSGPackSerializer.dumps(left) if left else b""
    if not left:
        result.type = NOT_FOUND


def fit(answer: FindResponse, room: float, proven: Proven) -> None:
    """Leave as many records under each key as have room, in bytes; those of ``proven`` authors first, the others at
    random: the asker names them the next time, and gets others. One at least: else a key would seem to be empty.
    """
    found = [it for it in answer.results if it.type == FOUND_DICTIONARY]
    room -= answer.ByteSize() - sum(len(it.value) for it in found)
    for result in found:
        if len(result.value) > room:
            rows = list(rows_of(result.value))
            random.shuffle(rows)
            rows.sort(key=lambda row: owner_of_subkey(row[0]).peer_id not in proven)
            ends = accumulate((len(MSGPackSerializer.dumps(list(row))) for row in rows), initial=DICTIONARY_BYTES)
            fitting = sum(1 for _ in takewhile(room.__ge__, ends)) - 1
            _put(result, rows[: max(1, fitting)])
        room -= len(result.value)


def add_known(request: FindRequest, known: Known) -> None:
    """Say in a request what the answer may leave out."""
    said = _KNOWN(fingerprints=known.fingerprints, everything=int(known.everything))
    request.MergeFromString(said.SerializeToString())


def leave_out(request: FindRequest, answer: FindResponse) -> None:
    """Take out of our answer what the request says to be known, and the nodes farther away."""
    try:
        said = _KNOWN.FromString(request.SerializeToString())
    except DecodeError:
        return
    data = said.fingerprints[: FINGERPRINT_BYTES * KNOWN_RECORDS]
    if not said.HasField("fingerprints"):
        return
    known = {data[at : at + FINGERPRINT_BYTES] for at in range(0, len(data), FINGERPRINT_BYTES)}
    for key, result in zip(request.keys, answer.results, strict=False):
        del result.nearest_node_ids[NEIGHBOURS:], result.nearest_peer_ids[NEIGHBOURS:]
        if result.type != FOUND_DICTIONARY:
            continue
        rows = () if said.everything else rows_of(result.value)
        _put(result, (row for row in rows if fingerprint(key, row[0], row[2]) not in known))


class CheckedP2P(P2P):
    """hivemind's client of the p2p daemon, with ``requests`` around all that its DHT receives and sends."""

    requests: Requests

    @property
    def ended(self) -> bool:
        """No call is answered any more."""
        return calls_have_ended(self)

    async def add_protobuf_handler(
        self, name: str, handler: Callable[..., Any], input_protobuf_type: Any, **how: Any
    ) -> None:
        async def checked(request: Any, context: Any) -> Any:
            self.requests.check_request(request, context.remote_id)
            answer = await handler(request, context)
            if isinstance(answer, FindResponse):
                leave_out(request, answer)
            self.requests.count_answer(answer, context.remote_id)
            self.requests.ours(answer)
            return answer

        await super().add_protobuf_handler(name, checked, input_protobuf_type, **how)

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, input: Any, output_protobuf_type: Any) -> Any:
        if isinstance(input, StoreRequest) and DHTProtocol.IS_DICTIONARY in input.subkeys:
            return StoreResponse(store_ok=[False] * len(input.keys))  # records of others, for a node that is new
        if isinstance(input, FindRequest) and (known := SAID.get()) is not None:
            add_known(input, known)
        self.requests.ours(input)
        answer = await super().call_protobuf_handler(peer_id, name, input, output_protobuf_type)
        self.requests.check_answer(input, answer, peer_id)
        return answer


async def attach(control: str, sockets: Path, requests: Requests) -> CheckedP2P:
    """hivemind's client of the daemon that listens at ``control`` (a multiaddr); its own socket is in ``sockets``."""
    # hivemind puts it where this private attribute says
    placed: Any = type("PlacedP2P", (CheckedP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
    p2p: CheckedP2P = await placed.replicate(Multiaddr(control))
    mend_calls(p2p)
    p2p.requests = requests
    return p2p
