"""Each request to the DHT and each answer: whose it is, how large, and where the nodes in it stand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import base58
import msgpack
import msgpack.fallback
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.dht_pb2 import (
    NOT_FOUND,
    FindRequest,
    FindResponse,
    FindResult,
    NodeInfo,
    PingRequest,
    PingResponse,
    StoreRequest,
)
from hivemind.utils import MSGPackSerializer

from peer.p2p import identity
from peer.p2p.budgets import DHT_BYTES, DHT_REQUESTS, RECORDS
from peer.p2p.dht import requests
from peer.p2p.dht.authors import Author, owner_of_subkey
from peer.p2p.dht.limits import RECORD, SUBKEY_BYTES, rows_of
from peer.p2p.dht.requests import (
    ANSWER_BYTES,
    BUCKET_NODES,
    KEY_RECORDS,
    KEY_RECORDS_EACH,
    KEYS,
    LONGEST_ANSWER,
    PACKED_RECORDS,
    READ_RECORDS,
    RefusedRequest,
    Requests,
    add_known,
    fit,
    leave_out,
    place_of_node,
)
from peer.p2p.dht.search import NEIGHBOURS, Known, fingerprint
from peer.rounds.backoff import Proven

KEY = bytes(20)


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> Sequence[tuple[PeerID, Author]]:
    """Two peers of an open swarm."""
    found = []
    for name in ("one", "two"):
        key = tmp_path_factory.mktemp("keys") / name
        found.append((PeerID.from_base58(identity.load_or_create(key)), Author(key)))
    return found


def store(*subkeys: str | None, key: bytes = KEY, lasts: float = 30.0) -> StoreRequest:
    count = len(subkeys)
    return StoreRequest(
        keys=[key] * count,
        subkeys=[msgpack.packb(subkey) for subkey in subkeys],
        values=[b"x"] * count,
        expiration_time=[time.time() + lasts] * count,
        in_cache=[False] * count,
    )


def test_a_record_is_taken_from_its_author(authors: Sequence[tuple[PeerID, Author]]) -> None:
    (one, author), (two, _) = authors
    mine = one.to_base58() + author.tag
    checks = Requests(author, Proven())
    checks.check_request(store(mine), one)
    with pytest.raises(RefusedRequest, match="from its author"):
        checks.check_request(store(mine), two)
    with pytest.raises(RefusedRequest, match="from its author"):
        checks.check_request(store(two.to_base58() + "x"), two)
    whole = store(mine)
    whole.subkeys[0] = DHTProtocol.IS_DICTIONARY
    with pytest.raises(RefusedRequest, match="from its author"):
        checks.check_request(whole, one)
    checks.check_request(store(None), two)  # the list of revocations, which its own signature guards


def test_requests_that_are_not_aligned_or_for_a_cache_are_refused(authors: Sequence[tuple[PeerID, Author]]) -> None:
    one, author = authors[0]
    checks, good = Requests(author, Proven()), store(one.to_base58())
    checks.check_request(good, one)
    for field in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
        short = StoreRequest.FromString(good.SerializeToString())
        del getattr(short, field)[:]
        with pytest.raises(RefusedRequest):
            checks.check_request(short, one)
    good.in_cache[0] = True
    with pytest.raises(RefusedRequest):
        checks.check_request(good, one)
    with pytest.raises(RefusedRequest):
        checks.check_request(store(*[one.to_base58()] * 65), one)
    checks.check_request(FindRequest(keys=[bytes([it]) * 20 for it in range(KEYS)]), one)
    with pytest.raises(RefusedRequest):
        checks.check_request(FindRequest(keys=[KEY] * (KEYS + 1)), one)


@pytest.mark.parametrize(("key", "more"), [(KEY, "A" * SUBKEY_BYTES), (KEY + b"x", ""), (b"", "")])
def test_a_key_or_subkey_of_another_length_is_not_remembered(
    authors: Sequence[tuple[PeerID, Author]], key: bytes, more: str
) -> None:
    """A node that would refuse the record later kept its subkey of any length for a minute: 150 MB of them."""
    one, author = authors[0]
    checks = Requests(author, Proven())
    subkey = one.to_base58() + author.tag.removesuffix("]") + more + "]"
    with pytest.raises(RefusedRequest, match="of another length"):
        checks.check_request(store(subkey, key=key), one)
    assert not checks._kept._by_key


def test_one_author_has_a_number_of_records_and_a_key_has_too(authors: Sequence[tuple[PeerID, Author]]) -> None:
    one, author = authors[0]
    checks, mine = Requests(author, Proven()), one.to_base58()
    for number in range(RECORDS.each):
        checks.check_request(store(mine, key=number.to_bytes(20, "big")), one)
    checks.check_request(store(mine, key=bytes(20)), one)  # one that it has already
    with pytest.raises(RefusedRequest, match="too many records"):
        checks.check_request(store(mine, key=b"\xff" * 20), one)

    kept, later = requests._Kept(Proven()), time.time() + 1e11
    assert all(kept.room(KEY, str(number), later) for number in range(KEY_RECORDS))
    assert not kept.room(KEY, "another", later) and kept.room(KEY, "0", later) and kept.room(b"k", "another", later)


def test_each_way_to_write_a_subkey_counts_as_a_record(authors: Sequence[tuple[PeerID, Author]]) -> None:
    """Padding after the own key, or spaces in the certificate, gave one author many records under one key: eight ids
    filled it, and newcomers were in no directory.
    """
    one, author = authors[0]
    checks, mine = Requests(author, Proven()), one.to_base58() + author.tag.removesuffix("]")
    for number in range(KEY_RECORDS_EACH):
        checks.check_request(store(f"{mine}{'=' * number}]"), one)
    with pytest.raises(RefusedRequest, match="too many records"):
        checks.check_request(store(f"{mine}{'=' * KEY_RECORDS_EACH}]"), one)


def test_a_key_that_a_crowd_has_filled_is_not_full_for_who_has_proved_to_be_good() -> None:
    proven, later = Proven(), time.time() + 60
    kept = requests._Kept(proven)
    assert all(kept.room(KEY, str(number), later) for number in range(KEY_RECORDS))
    proven.add("a good one")
    assert kept.room(KEY, "a good one", later) and not kept.room(KEY, "another", later)


def test_an_expired_record_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(requests.clock, "unix", lambda: now[0])
    monkeypatch.setattr(requests.clock, "monotonic", lambda: now[0])
    kept = requests._Kept(Proven())
    assert all(kept.room(KEY, str(number), 1e11) for number in range(KEY_RECORDS))
    now[0] += 50.0
    assert not kept.room(KEY, "another", 1e11)
    now[0] += 50.0
    assert kept.room(KEY, "another", 1e11), "whatever its expiration said, a record lives for a minute"


def test_a_flood_of_one_id_leaves_room_for_others(authors: Sequence[tuple[PeerID, Author]]) -> None:
    (one, author), (two, _) = authors
    checks = Requests(author, Proven())

    def answered(request: object, remote: PeerID) -> bool:
        try:
            checks.check_request(request, remote)
        except RefusedRequest as error:
            assert "too many requests" in str(error)
            return False
        return True

    flood = sum(answered(PingRequest(), one) for _ in range(5000))
    assert flood < 2 * DHT_REQUESTS.each * DHT_REQUESTS.burst
    assert answered(PingRequest(), two)
    large = StoreRequest(keys=[KEY], subkeys=[DHTProtocol.IS_REGULAR_VALUE], values=[bytes(500_000)])
    large.expiration_time.append(0.0)
    large.in_cache.append(False)
    assert 1 <= sum(answered(large, two) for _ in range(50)) <= 2 * DHT_BYTES.each * DHT_BYTES.burst / 500_000


def test_many_keys_are_many_requests_and_an_answer_counts_by_its_bytes(
    authors: Sequence[tuple[PeerID, Author]],
) -> None:
    (one, author), (two, _) = authors
    checks, keys = Requests(author, Proven()), [bytes([it]) * 20 for it in range(KEYS)]
    for bad in ([KEY] * 2, [*keys, KEY[:-1]]):
        with pytest.raises(RefusedRequest, match=f"at most {KEYS} keys, each once"):
            checks.check_request(FindRequest(keys=bad), two)
    for _ in range(int(DHT_REQUESTS.each * DHT_REQUESTS.burst / KEYS)):
        checks.check_request(FindRequest(keys=keys), one)
    with pytest.raises(RefusedRequest, match="too many requests"):
        for _ in range(10):
            checks.check_request(FindRequest(keys=keys), one)
    with pytest.raises(RefusedRequest, match="too many requests"):  # what is refused for its keys has cost something
        checks.check_request(FindRequest(keys=[KEY] * 100), one)
    reply = FindResponse(results=[FindResult(value=bytes(100_000))])
    with pytest.raises(RefusedRequest, match="too many bytes"):
        for _ in range(2 * int(DHT_BYTES.each * DHT_BYTES.burst / 100_000)):
            checks.count_answer(reply, two)


def test_a_question_for_a_full_key_counts_as_many(
    authors: Sequence[tuple[PeerID, Author]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its records are packed and read for the answer: one of 200 bytes for eight full keys took up to 30 ms of the
    network thread, and 50 of them a second were within the budget.
    """
    now = [time.time()]
    monkeypatch.setattr(requests.clock, "unix", lambda: now[0])
    monkeypatch.setattr(requests.clock, "monotonic", lambda: now[0])
    (_, author), (two, _) = authors
    checks, burst = Requests(author, Proven()), int(DHT_REQUESTS.each * DHT_REQUESTS.burst)

    def answered() -> int:
        """How many such questions it may ask when it has asked nothing for a while."""
        now[0] += DHT_REQUESTS.burst
        for number in range(2 * burst):
            try:
                checks.check_request(FindRequest(keys=[KEY]), two)
            except RefusedRequest:
                return number
        raise AssertionError("no end")

    for number in range(PACKED_RECORDS - 1):
        assert checks._kept.room(KEY, str(number), now[0] + 60)
    assert answered() == burst, "few records, as a bucket of the directory has: it is one request"
    for number in range(KEY_RECORDS):
        checks._kept.room(KEY, str(number), now[0] + 60)
    assert answered() == burst // (1 + KEY_RECORDS // PACKED_RECORDS)
    now[0] += 60
    assert answered() == burst, "they have expired"


@pytest.mark.parametrize("place", [0, 1])
def test_a_dictionary_that_fails_when_it_is_used_is_no_answer(
    place: int, authors: Sequence[tuple[PeerID, Author]]
) -> None:
    one, author = authors[0]
    fields = [None, time.time() + 20]
    fields[place] = "x"  # type: ignore[call-overload]
    rows = [signed(author, one.to_base58() + author.tag, time.time() + 20)]
    values = [MSGPackSerializer.dumps(msgpack.ExtType(0x50, msgpack.packb([*it, rows]))) for it in (fields, [None, 0])]
    values += [b"\xc1", MSGPackSerializer.dumps({"a": "dictionary"})]
    reply = FindResponse(results=[FindResult(type=dht_pb2.FOUND_DICTIONARY, value=it) for it in values])
    Requests(author, Proven()).check_answer(FindRequest(keys=[KEY] * len(values)), reply, one)
    for result in reply.results:  # as hivemind uses it
        found = (
            MSGPackSerializer.loads(result.value) if result.type == dht_pb2.FOUND_DICTIONARY else DictionaryDHTValue()
        )
        assert len(found) == len(dict(found.items()))
    assert [it.type for it in reply.results[1:]] == [dht_pb2.FOUND_DICTIONARY, NOT_FOUND, NOT_FOUND]


def signed(author: Author, subkey: str, expires: float, key: bytes = KEY) -> tuple[str, bytes, float]:
    """A record, as a node keeps it."""
    return subkey, author.validator.sign_value(DHTRecord(key, msgpack.packb(subkey), b"\xa2{}", expires)), expires


def test_one_false_record_costs_an_answer_that_record_only(authors: Sequence[tuple[PeerID, Author]]) -> None:
    """hivemind drops all. An expired invitation, or one that only the reader knew to be revoked, hid all members."""
    (one, author), (two, other) = authors
    now, mine, others = time.time(), one.to_base58() + author.tag, two.to_base58() + other.tag
    false: list[tuple[Any, Any, Any]] = [
        signed(other, f"{others[:-1]}=]", now + 1000),
        (f"{others[:-1]}==]", b"\xa2{}", now + 20),
        signed(author, f"{others[:-1]}===]", now + 20),
        signed(author, mine[:-1] + "=]", now + 20, b"another key"),
        (7, b"value", now + 21),
        ("text", "text", now + 20),
    ]
    good = [signed(author, mine, now + 20), signed(other, others, now + 20)]
    for rows in ([*false, *good], [*good, *false]):
        value = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, now, rows])))
        reply = FindResponse(results=[FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value)])
        Requests(author, Proven()).check_answer(FindRequest(keys=[KEY]), reply, one)
        left = MSGPackSerializer.loads(reply.results[0].value)
        assert [(subkey, *it) for subkey, it in left.items()] == good


def test_no_more_records_of_an_answer_are_checked_than_a_node_has(
    authors: Sequence[tuple[PeerID, Author]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, author), checked = authors[0], list[DHTRecord]()
    monkeypatch.setattr(author.validator, "validate", checked.append)
    reply = answer(*map(str, range(2 * READ_RECORDS)), expires=time.time() + 20)
    Requests(author, Proven()).check_answer(FindRequest(keys=[KEY]), reply, one)
    assert len(checked) == READ_RECORDS > KEY_RECORDS and reply.results[0].type == NOT_FOUND


@pytest.fixture(params=[msgpack, msgpack.fallback], ids=["msgpack", "without its C part"])
def unpacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Unpacker", "unpackb"):
        monkeypatch.setattr(msgpack, name, getattr(request.param, name))


@pytest.mark.usefixtures("unpacking")
def test_the_rows_of_an_answer_are_those_that_hivemind_reads() -> None:
    """It keeps also what has expired, and in the order in which it came. Without the C part of msgpack each dictionary
    seemed to be empty.
    """
    (result,), now = answer(*map(str, range(300)), expires=time.time() - 5).results, time.time()
    held = DictionaryDHTValue()
    for number, subkey in enumerate(("", "a" * 900, "ä\U0001f600", "[owner:x]")):
        held.store(subkey, bytes(number), now + number)
    for packed in (result.value, MSGPackSerializer.dumps(held), MSGPackSerializer.dumps(DictionaryDHTValue(5))):
        read = MSGPackSerializer.loads(packed)
        assert list(rows_of(packed)) == [(subkey, *it) for subkey, it in read.data.items()]


@pytest.mark.usefixtures("unpacking")
def test_what_nobody_asks_for_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 280 kB of empty lists the collector of garbage took half a second."""
    lists = [["a", b"x", 1.0], [[[], []], b"x", 1.0], *[[]] * 100_000]
    packed = MSGPackSerializer.dumps(msgpack.ExtType(0x50, msgpack.packb([[[]] * 1000, [[]] * 1000, lists])))
    unpacked, unpackb, hold = list[object](), msgpack.unpackb, msgpack.Unpacker

    class Unpacker(hold):  # type: ignore[misc, valid-type]
        def unpack(self) -> object:
            unpacked.append(super().unpack())
            return unpacked[-1]

    def noted(*args: Any, **how: Any) -> object:
        unpacked.append(unpackb(*args, **how))
        return unpacked[-1]

    monkeypatch.setattr(msgpack, "Unpacker", Unpacker)
    monkeypatch.setattr(msgpack, "unpackb", noted)
    assert list(rows_of(packed)) == [("a", b"x", 1.0)] and unpacked[1:] == ["a", b"x", 1.0]
    assert isinstance(unpacked[0], msgpack.ExtType)


def tuples(count: int) -> bytes:
    """A dictionary whose subkeys are tuples: hashes of numbers have no secret, so they can be made to collide."""
    rows = [[(number, number), b"x", time.time() + 20] for number in range(count)]
    return MSGPackSerializer.dumps(msgpack.ExtType(0x50, MSGPackSerializer.dumps([None, 0, rows])))


@pytest.mark.parametrize(
    "value",
    [
        tuples(9),
        MSGPackSerializer.dumps([tuples(9), (1, 2)]),
        MSGPackSerializer.dumps({"a": (1, 2)}),
        MSGPackSerializer.dumps(msgpack.ExtType(0x50, msgpack.packb([None, 0, [[{"a": 1}, b"x", 0]]]))),
        MSGPackSerializer.dumps(msgpack.ExtType(0x50, msgpack.packb([None, 0, [7, [], ["a"], "abc"]]))),
        MSGPackSerializer.dumps(msgpack.ExtType(0x50, msgpack.packb([None, 0, 7]))),
        MSGPackSerializer.dumps(msgpack.ExtType(0x51, msgpack.packb([None, 0, []]))),
    ],
    ids=["tuples", "a list", "a map", "a map as subkey", "other rows", "no rows", "another type"],
)
def test_of_an_answer_no_dictionary_is_made_before_its_records_are_checked(
    value: bytes, authors: Sequence[tuple[PeerID, Author]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 160 kB held the network thread for 2 s, and one of 4 MB for minutes."""
    made: list[int] = []
    monkeypatch.setattr(MSGPackSerializer, "_decode_ext_types", lambda code, data: made.append(code))
    (one, author), found = authors[0], FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value)
    reply = FindResponse(results=[found])
    Requests(author, Proven()).check_answer(FindRequest(keys=[KEY]), reply, one)
    assert reply.results[0].type == NOT_FOUND and not reply.results[0].value and not made


def test_an_answer_that_no_node_gives_is_refused_before_it_is_read(authors: Sequence[tuple[PeerID, Author]]) -> None:
    (one, author), certificate = authors[0], 1024
    checks, request = Requests(author, Proven()), FindRequest(keys=[bytes([it]) * 20 for it in range(KEYS)])
    whole = FindResponse(results=[full_key() for _ in range(KEYS)])
    for result in whole.results:
        result.nearest_node_ids.extend([KEY] * BUCKET_NODES)
        result.nearest_peer_ids.extend([one.to_bytes()] * BUCKET_NODES)
    fit(whole, ANSWER_BYTES, Proven())
    assert ANSWER_BYTES < whole.ByteSize() < LONGEST_ANSWER - certificate, "the longest that our nodes give"
    checks.check_answer(request, whole, one)
    for reply in (
        FindResponse(results=[FindResult(nearest_node_ids=[b""] * LONGEST_ANSWER)]),
        FindResponse(results=[FindResult(value=bytes(LONGEST_ANSWER))]),
        PingResponse(peer=NodeInfo(node_id=bytes(LONGEST_ANSWER))),
    ):
        with pytest.raises(RefusedRequest, match="too long"):
            checks.check_answer(request, reply, one)


def test_of_the_nodes_in_an_answer_as_many_are_read_as_a_node_names(
    authors: Sequence[tuple[PeerID, Author]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind writes each id in base58, whose time is that of its length squared: one id of 250 kB took a minute."""
    written, encode = list[int](), base58.b58encode
    monkeypatch.setattr(base58, "b58encode", lambda data, **how: (written.append(len(data)), encode(data, **how))[1])
    (one, author), long = authors[0], bytes(3000)
    ids = [long, *(b"\x12\x20" + number.to_bytes(32, "big") for number in range(2 * BUCKET_NODES))]
    places = [requests.DHTID.generate(source=it).to_bytes() for it in ids]
    reply = FindResponse(results=[FindResult(type=NOT_FOUND, nearest_node_ids=places, nearest_peer_ids=ids)])
    Requests(author, Proven()).check_answer(FindRequest(keys=[KEY]), reply, one)
    assert list(reply.results[0].nearest_peer_ids) == ids[1:BUCKET_NODES]
    assert list(reply.results[0].nearest_node_ids) == places[1:BUCKET_NODES]
    assert written == [34] * (BUCKET_NODES - 1)


def test_nobody_chooses_its_place(authors: Sequence[tuple[PeerID, Author]]) -> None:
    (one, author), (two, _) = authors
    checks = Requests(author, Proven())
    own, other = (NodeInfo(node_id=place_of_node(it).to_bytes()) for it in (one, two))
    checks.check_request(PingRequest(peer=own), one)
    with pytest.raises(RefusedRequest, match="place"):
        checks.check_request(PingRequest(peer=other), one)
    result = FindResult(type=dht_pb2.NOT_FOUND)
    for place in (own, other):
        result.nearest_node_ids.append(place.node_id)
        result.nearest_peer_ids.append(one.to_bytes())
    answer = FindResponse(results=[result], peer=own)
    request = FindRequest(keys=[KEY])
    checks.check_answer(request, answer, one)
    assert list(answer.results[0].nearest_node_ids) == [own.node_id]
    assert list(answer.results[0].nearest_peer_ids) == [one.to_bytes()]
    with pytest.raises(RefusedRequest, match="place"):
        checks.check_answer(request, FindResponse(peer=other), one)


def full_key(*others: str) -> FindResult:
    """As many records as a node keeps under a key, of the largest size, and then those of ``others``."""
    held = DictionaryDHTValue()
    for peer_id in (*(f"Qm{number + 1000}".replace("0", "z") for number in range(KEY_RECORDS)), *others):
        subkey = f"{peer_id}[owner:ssh-rsa {'A' * (SUBKEY_BYTES - len(peer_id) - 19)}]"
        assert len(msgpack.packb(subkey)) == SUBKEY_BYTES and owner_of_subkey(subkey).peer_id == peer_id
        held.store(subkey, bytes(RECORD.size), time.time() + 20)
    return FindResult(type=dht_pb2.FOUND_DICTIONARY, value=MSGPackSerializer.dumps(held), nearest_node_ids=[KEY])


def authors_in(result: FindResult) -> list[str]:
    return [owner_of_subkey(subkey).peer_id for subkey, _ in MSGPackSerializer.loads(result.value).items()]


def test_a_key_that_a_crowd_has_filled_is_told_in_parts_and_first_of_who_has_proved_to_be_good(
    authors: Sequence[tuple[PeerID, Author]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """110 ids made an answer that no newcomer's budget had room for: the node refused each, and seemed to be silent."""
    monkeypatch.setattr(requests.clock, "monotonic", lambda: 100.0)
    (_, author), (newcomer, _), proven = *authors, Proven()
    for name in ("Qmgood", "Qmbest"):
        proven.add(name)
    checks, whole, heard = Requests(author, proven), full_key("Qmgood", "Qmbest"), set[str]()
    assert whole.ByteSize() > DHT_BYTES.each * DHT_BYTES.burst
    for _ in range(5):
        reply = FindResponse(results=[whole])
        checks.count_answer(reply, newcomer)
        assert reply.ByteSize() <= ANSWER_BYTES and reply.results[0].nearest_node_ids
        found = authors_in(reply.results[0])
        assert set(found[:2]) == {"Qmgood", "Qmbest"} and (heard or len(found) > 75)
        heard |= set(found)
    assert len(heard) > 100, "the others at random"


def test_of_many_keys_that_are_full_each_is_told_in_part(authors: Sequence[tuple[PeerID, Author]]) -> None:
    (_, author), (two, _) = authors
    reply = FindResponse(results=[full_key() for _ in range(KEYS)])
    Requests(author, Proven()).count_answer(reply, two)
    assert all(map(authors_in, reply.results)) and reply.ByteSize() < ANSWER_BYTES + KEYS * 4096


def test_no_more_records_are_packed_than_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, dumps = list[Any](), MSGPackSerializer.dumps
    reply = FindResponse(results=[full_key()])
    monkeypatch.setattr(MSGPackSerializer, "dumps", lambda it: (packed.append(it), dumps(it))[1])
    fit(reply, 10 * RECORD.size, Proven())
    rows = [it for it in packed if isinstance(it, list) and len(it) == 3 and isinstance(it[0], str)]
    assert 1 <= len(authors_in(reply.results[0])) < len(rows) <= 10


def test_an_answer_that_is_refused_has_cost_what_was_left(
    authors: Sequence[tuple[PeerID, Author]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.clock, "monotonic", lambda: 100.0)
    (_, author), (two, _) = authors
    checks = Requests(author, Proven())
    with pytest.raises(RefusedRequest, match="too many bytes"):
        checks.count_answer(FindResponse(results=[FindResult(value=bytes(1_000_000))]), two)
    with pytest.raises(RefusedRequest, match="too many requests"):
        checks.check_request(FindRequest(keys=[KEY]), two)


def answer(*subkeys: str, expires: float) -> FindResponse:
    """Of a node that has records under :data:`KEY` and knows 20 others."""
    held = DictionaryDHTValue()
    for subkey in subkeys:
        held.store(subkey, b"signed", expires)
    nodes = [bytes([it]) * 20 for it in range(20)]
    value = MSGPackSerializer.dumps(held)
    found = FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, nearest_node_ids=nodes, nearest_peer_ids=nodes)
    return FindResponse(results=[found])


def test_an_answer_leaves_out_what_the_request_says_to_be_known() -> None:
    now = time.time() + 20
    request = FindRequest(keys=[KEY])
    add_known(request, Known(fingerprint(KEY, "one", now) + fingerprint(KEY, "two", now - 5)))
    asked = FindRequest.FromString(request.SerializeToString())  # as it arrives
    reply = answer("one", "two", expires=now)
    leave_out(asked, reply)
    left = MSGPackSerializer.loads(reply.results[0].value)
    assert [subkey for subkey, _ in left.items()] == ["two"]  # the asker has an older one
    assert len(reply.results[0].nearest_node_ids) == len(reply.results[0].nearest_peer_ids) == NEIGHBOURS
    reply = answer("one", expires=now)
    leave_out(asked, reply)
    assert reply.results[0].type == NOT_FOUND and not reply.results[0].value
    asked.keys[0] = bytes([1]) * 20
    reply = answer("one", expires=now)
    leave_out(asked, reply)
    assert reply.results[0].value  # known under another key


def test_who_asks_for_nodes_gets_no_records_and_who_says_nothing_gets_all() -> None:
    request = FindRequest(keys=[KEY])
    whole = answer("one", expires=time.time() + 20)
    reply = FindResponse.FromString(whole.SerializeToString())
    leave_out(request, reply)
    assert reply == whole
    add_known(request, Known(everything=True))
    leave_out(request, reply)
    assert reply.results[0].type == NOT_FOUND and not reply.results[0].value
