"""The parsers of untrusted input as functions of bytes. One that raises has a defect.

``examples`` are valid inputs. Each input may take ``SECONDS`` and allocate ``BYTES``; the callers check both
(tests/fuzz/__main__.py, tests/unit/project/test_fuzz.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import FOUND_DICTIONARY, FindRequest, FindResponse, NodeInfo, PingRequest, StoreRequest
from hivemind.utils import MSGPackSerializer
from msgpack.exceptions import UnpackException
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from dht_bootstrap.collector import SwarmCollector
from dht_bootstrap.history import RunHistory
from dht_bootstrap.monitor import json_answer
from dht_bootstrap.targets import ENDPOINT
from dht_bootstrap.targets import targets as targets_of
from dht_bootstrap.view import run_view
from peer.config import load, schema
from peer.config.digest import canonical
from peer.config.received import received, require_hub_tokenizer
from peer.config.schema import CodecName, Config, RunConfig
from peer.errors import UserError
from peer.exchange.codec import size, unpack
from peer.exchange.group import wire as group_wire
from peer.exchange.modulo import codec_named
from peer.exchange.pair import wire
from peer.p2p import addresses, greeting, identity
from peer.p2p.admission import gate
from peer.p2p.admission.dht_rules import REVOCATIONS, Authority, decode_revocations
from peer.p2p.admission.invitation import Admission, Certificate, Invitation, Owner, accept, invite
from peer.p2p.budgets import DHT_BYTES, DHT_REQUESTS, Spending
from peer.p2p.dht.authors import Author, owner_of_subkey
from peer.p2p.dht.requests import RefusedRequest, Requests
from peer.p2p.dht.whereabouts import Whereabouts
from peer.p2p.payload import receive_fp32
from peer.p2p.reachability import circuit_messages, dialback, relay
from peer.p2p.stream import BadMessage, Refusal, Stream, StreamLost
from peer.rounds.backoff import Proven
from peer.rounds.contribution import SparseContribution
from peer.swarm.directory import records
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import MemberRecord
from peer.swarm.grouping import messages as grouping
from peer.swarm.pairing import agreement as pairing
from peer.swarm.state_transfer import donor
from tests.swarm.support.packets import nested

SECONDS = 1.0
BYTES = 8 * 2**20
NUMEL = 1000
KINDS: tuple[type[Any] | TypeAdapter[Any], ...] = (
    *(pairing.Propose, pairing.PROPOSAL_ANSWER, pairing.PartnerReady, wire.Header, wire.Acknowledgement),
    *(group_wire.Hello, group_wire.MemberReport, group_wire.GroupVerdict),
    *(donor.StateRequest, donor.STATE_ANSWER, donor.StateReceived),
    *(grouping.GROUP_CALL, grouping.JOIN_ANSWER, grouping.MemberReady, grouping.LEADER_MESSAGE),
    *(greeting.Greeting, Refusal),
    *(gate.Pass, gate.Knock, gate.Notice),
    *(dialback.Ask, dialback.ANSWER, relay.Reserve, relay.Granted, relay.Ping),
)
CODECS: tuple[CodecName, ...] = schema.CODECS["noloco"]


@dataclass(frozen=True)
class Target:
    """``read`` takes any bytes."""

    read: Callable[[bytes], None]
    examples: Sequence[bytes]


# -- messages between two peers


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _stream(data: bytes) -> Stream:
    """A stream whose other side has sent ``data`` and closed it."""
    reader = asyncio.StreamReader(loop=_loop())
    reader.feed_data(data)
    reader.feed_eof()
    return Stream(reader, None, remote="Qm", initiator=True)  # type: ignore[arg-type]


def message(data: bytes) -> None:
    """The first byte says which message is expected."""
    kinds = KINDS[data[0] % len(KINDS)] if data else KINDS[0]

    async def receive() -> None:
        try:
            said = await _stream(data[1:]).receive(kinds, SECONDS)
        except (BadMessage, StreamLost):
            return
        assert len(said.model_dump_json()) < 2 * len(data) + 2000

    _loop().run_until_complete(receive())


def relayed(data: bytes) -> None:
    """libp2p's own messages, as a relay reads them; and the host and port of an address."""

    async def receive() -> None:
        for read in (circuit_messages.read_hop, circuit_messages.read_stop_status):
            with contextlib.suppress(BadMessage, asyncio.IncompleteReadError):
                await read(_stream(data).reader)

    _loop().run_until_complete(receive())
    found = addresses.tcp_of(data.decode(errors="replace"))
    assert found is None or addresses.tcp_of(addresses.tcp_place(*found)) == found


class _Nowhere:
    """A writer that counts what it is given, and a p2p daemon that is connected to nobody."""

    peer_id, written = PeerID(bytes(34)), 0

    def write(self, data: bytes) -> None:
        self.written += len(data)

    async def nothing(self) -> list[Any]:
        return []

    drain = get_visible_maddrs = list_peers = nothing

    def close(self) -> None: ...


def whereabouts(data: bytes) -> None:
    """Requests of libp2p's Kademlia: an answer repeats the key, and names one node here."""
    stream, there = _stream(data), _Nowhere()
    stream.writer = there  # type: ignore[assignment]
    _loop().run_until_complete(Whereabouts(there, lambda _: True, Proven()).answer(stream))
    assert there.written <= 64 * len(data)


def payload(data: bytes) -> None:
    """Plain, coded and sparse parts of a vector: never out of range, and the codec works afterwards."""
    name = CODECS[data[0] % len(CODECS)] if data else "none"
    own = torch.linspace(-1, 1, NUMEL)

    async def receive() -> None:
        try:
            await receive_fp32(_stream(data[1:]), torch.empty(NUMEL), SECONDS)
        except (BadMessage, StreamLost):
            return

    _loop().run_until_complete(receive())
    room = bytearray(size(name, NUMEL))
    room[: len(data)] = data[: len(room)]
    codec = codec_named(name, NUMEL)
    codec.begin()
    codec.decode(name, 0, room, own, torch.empty(NUMEL))
    codec.end_round(True)
    codec.begin()
    assert len(codec.encode(0, own)) == size(codec.sends, NUMEL)
    coefficients = torch.frombuffer(room[: 4 * (len(room) // 4)], dtype=torch.float32)
    places = torch.zeros(len(coefficients), dtype=torch.int64)
    like = SparseContribution(10**6, places, places, coefficients)
    assert int(unpack(coefficients, like).positions.max()) < 2**16


# -- DHT records


@cache
def _authority() -> Authority:
    owner = Owner(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        file, key = Path(folder) / "invitation", Path(folder) / "key"
        file.write_text(invite(owner, "fuzz", time.time() + 1e6).model_dump_json())
        certificate = accept(file, key, owner.public).certificate
        return Authority(Admission(owner.public, certificate), key)


def record(data: bytes) -> None:
    """Subkey and value, separated by the first zero byte, as text and as bytes."""
    subkey, _, value = data.partition(b"\0")
    words = subkey.decode(errors="replace"), value.decode(errors="replace")
    found = records.decode(*words)
    assert found is None or found.peer_id == owner_of_subkey(words[0]).peer_id
    other = records.program_of(*words)
    assert other is None or (other.name + other.version).isprintable()
    decode_revocations(words[1])
    authority, until = _authority(), time.time() + 10
    for key in (REVOCATIONS, "run/members/0/0"):
        place = DHTID.generate(source=key).to_bytes()
        pack = MSGPackSerializer.dumps
        for entry in ((subkey, value), (pack(words[0]), pack(words[1]))):
            assert not authority.validator.validate(DHTRecord(place, *entry, until)), "accepted without a signature"


@dataclass
class Known:
    """What the collector reads of a watch."""

    runs: dict[str, RunHistory]
    lock: Any = field(default_factory=contextlib.nullcontext)
    reads: dict[str, int] = field(default_factory=lambda: {"ok": 1, "failed": 0})
    read_seconds: float = 0.1
    connected: int = 1


def monitor(data: bytes) -> None:
    """Values of records, one a line, each of a member of its own, as the bootstrap's monitor shows them."""
    found = {}
    for number, line in enumerate(data.decode(errors="replace").split("\n")):
        one = records.decode("Qm", line)
        if one is not None:
            found[f"Qm{number}"] = one.model_copy(update={"peer_id": f"Qm{number}"})
    history, now = RunHistory(), 1e9
    for at in range(6):  # a clock is judged by five readings
        history.see({key: Entry(it, now + records.LIFETIME + at) for key, it in found.items()}, now + at, room=3)
    for networks in ((), (IPv4Network("0.0.0.0/0"),)):
        for target in targets_of({"run": history}, networks):
            endpoint = ENDPOINT.fullmatch(target["targets"][0])
            assert endpoint and 1024 <= int(endpoint[2]) < 2**16
            host = IPv4Address(endpoint[1])
            assert not (host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved)
            assert networks or host.is_global
    body = json_answer(200, run_view("run", history, now + 6)).body.decode()
    json.dumps(shown := json.loads(body), allow_nan=False)
    assert None not in (shown["tokens_per_second"], shown["tokens"])
    assert all(it["text"].isprintable() for it in shown["warnings"])
    registry = CollectorRegistry()
    registry.register(SwarmCollector(Known({"run": history})))  # type: ignore[arg-type]
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert all(math.isfinite(sample.value) for sample in family.samples), family


def certificate(data: bytes) -> None:
    """A peer id and a certificate, separated by the first zero byte."""
    peer_id, _, text = data.decode(errors="replace").partition("\0")
    if _authority().admits(peer_id, text):  # the right one in another notation
        assert Certificate.model_validate_json(text).payload() == _authority().admission.own.payload()


# -- requests to the DHT


class _Context(NamedTuple):
    remote_id: PeerID


class _Server:
    """hivemind's DHT of a peer of an open swarm, with our checks before it. Its requests to others go nowhere."""

    def __init__(self) -> None:
        key = _folder() / "server.key"
        self.remote = PeerID.from_base58(identity.load_or_create(key))
        author = Author(key)
        self.requests = Requests(author, Proven())
        self.requests.check_request = partial(self._without_budget, self.requests.check_request)  # type: ignore[method-assign]
        self.protocol = it = DHTProtocol(_initialized_with_create=True)
        it.node_id, it.bucket_size, it.num_replicas, it.client_mode = DHTID.generate(source="x"), 20, 5, False
        it.node_info, it.record_validator = NodeInfo(node_id=it.node_id.to_bytes()), author.validator
        it.storage, it.cache, it.routing_table = DHTLocalStorage(), DHTLocalStorage(1), RoutingTable(it.node_id, 20, 5)

    def _without_budget(self, check: Callable[[Any, PeerID], None], request: Any, remote: PeerID) -> None:
        self.requests._requests, self.requests._bytes = (Spending(rate, Proven()) for rate in (DHT_REQUESTS, DHT_BYTES))
        check(request, remote)

    async def answer(self, kind: int, data: bytes) -> None:
        request = (PingRequest, StoreRequest, FindRequest)[kind % 3].FromString(data)
        self.requests.check_request(request, self.remote)
        name = ("rpc_ping", "rpc_store", "rpc_find")[kind % 3]
        answer = await getattr(self.protocol, name)(request, _Context(self.remote))
        assert answer.ByteSize() < 2**21


@cache
def _server() -> _Server:
    return _Server()


def request(data: bytes) -> None:
    """The kind, and a protobuf message. What has not the right form is an error of one request."""
    with contextlib.suppress(DecodeError, RefusedRequest, ValueError, AssertionError):
        _loop().run_until_complete(_server().answer(data[0] if data else 0, data[1:]))


def answer(data: bytes) -> None:
    """A protobuf message, which hivemind reads after our checks."""
    server = _server()
    with contextlib.suppress(DecodeError, RefusedRequest):
        found = FindResponse.FromString(data)
        server.requests.check_answer(FindRequest(keys=[bytes(20)]), found, server.remote)
        for result in found.results[:1]:
            assert result.type != FOUND_DICTIONARY or len(MSGPackSerializer.loads(result.value)) > 0


def extensions(data: bytes) -> None:
    """msgpack with extension types, as hivemind unpacks it."""
    with contextlib.suppress(ValueError, TypeError, LookupError, UnpackException, OverflowError, AttributeError):
        MSGPackSerializer.loads(data)


def _requests() -> list[bytes]:
    fields = {"keys": [bytes(20)], "subkeys": [b"\xa1x"], "values": [b"\xa2{}"], "in_cache": [False]}
    store = StoreRequest(**fields, expiration_time=[time.time() + 20], peer=NodeInfo(node_id=bytes(20)))
    whole = StoreRequest(**{**fields, "subkeys": [b""]}, expiration_time=[time.time() + 20])
    said = (PingRequest(peer=NodeInfo(node_id=bytes(20)), validate=True), store, FindRequest(keys=[bytes(20)]))
    return [bytes([kind]) + it.SerializeToString() for kind, it in enumerate(said)] + [
        b"\1" + whole.SerializeToString()
    ]


def _answers() -> list[bytes]:
    remote, expires = _server().remote, time.time() + 1000
    place, held = DHTID.generate(source=remote.to_bytes()).to_bytes(), DictionaryDHTValue()
    for subkey in ("x", f"{remote}[owner:ssh-rsa AAAA]"):
        held.store(subkey, b"\xa2{}", expires)
    nodes = {"nearest_node_ids": [place], "nearest_peer_ids": [remote.to_bytes()]}
    values = (MSGPackSerializer.dumps(held), *_extensions())
    results = [{"type": FOUND_DICTIONARY, "value": it, **nodes} for it in values]
    return [FindResponse(results=[it], peer=NodeInfo(node_id=place)).SerializeToString() for it in results]


def _extensions() -> list[bytes]:
    held = DictionaryDHTValue()
    held.store(("a", ("b", 1)), b"value", 1e10)
    return [MSGPackSerializer.dumps(held), nested(2), nested(300), nested(3, code=0x50)]


# -- files


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


def _one_line(read: Callable[[], object]) -> None:
    try:
        read()
    except UserError as error:
        assert len(str(error).splitlines()) == 1


def invitation(data: bytes) -> None:
    file = _folder() / "x.invitation"
    file.write_bytes(data)
    _one_line(lambda: accept(file, _folder() / "x.key", _authority().admission.owner))


def config(data: bytes) -> None:
    file = _folder() / "x.yaml"
    file.write_bytes(data)
    _one_line(lambda: load.load(file, environment={}))


def joined(data: bytes) -> None:
    """The configuration that a member of another swarm sends: what is taken is what this version would write."""
    text = data.decode("utf-8", "replace")
    try:
        found = received(text)
        require_hub_tokenizer(found.tree)
    except UserError as error:
        assert len(str(error)) < 1000
        return
    local = {"train": ["x"], "folder": "x", "path": "x", "source": "x"}
    for key in found.needed:
        _, section, last = key.split(".")
        found.tree[section][last] = local[last]
    assert canonical(RunConfig.model_validate(found.tree)) == text


def _runs() -> list[bytes]:
    """Canonical texts of runs with all kinds of sections."""
    text = {"name": "text", "train": ("x",), "tokenizer": {"name": "gpt2", "vocabulary": 50257}}
    auto = {"name": "auto", "source": "x", "digest": "0123456789abcdef" * 2}
    runs: list[dict[str, Any]] = [{}, {"outer": {"name": "diloco"}, "data": text}, {"model": auto}]
    return [canonical(RunConfig.model_validate(it)).encode() for it in runs]


# -- valid inputs


def _framed(kind: int, said: str) -> bytes:
    return bytes([kind]) + len(said.encode()).to_bytes(4, "big") + said.encode()


def _messages() -> list[bytes]:
    header = wire.Header(payload_bytes=4, round=1)
    proposal = pairing.Propose(name="a", round=0, eta=1.0, phase=2.0)
    said = {0: proposal, 1: pairing.Accept(eta=1.0), 2: pairing.PartnerReady(), 3: header, 10: donor.StateReceived()}
    said[15] = greeting.Greeting(wire=2, version="0.2.0", run="r", config="c", layout="l")
    said[16] = Refusal(reason="it trains another configuration", run="{}")
    said[20] = dialback.Ask(places=["/ip4/45.1.2.3/tcp/31337"])
    said[5] = group_wire.Hello(token="t", index=1, header=header)
    return [_framed(kind, it.model_dump_json()) for kind, it in said.items()]


def _records() -> list[bytes]:
    it = MemberRecord.model_validate_json(
        '{"peer_id":"Qm","name":"a","addresses":["/ip4/1.2.3.4/tcp/5"],"config":"c","state":"training","step":1,'
        '"round":1,"tokens_per_second":1.0,"metrics":null}'
    )
    tag = _authority().tag
    return [f"{subkey}\0{it.model_dump_json()}".encode() for subkey in ("Qm", f"Qm{tag}")]


EXTREMES = (
    *("9" * 400, str(2**53), str(2**53 + 1), "-1", "0", "-0.0", "1e12", "1e10", "1.7e308", "1e999", "-1e999", "5e-324"),
    *("NaN", "Infinity", "3.5e38", "-3.5e38", "null", "true", "{}", r'"\ud800"', r'"a\n\u001b[2J\u202e"', '"<b>"'),
)
PLACES = ("169.254.169.254:80", "169.254.169.254:9464", "0.0.0.0:9464", "127.0.0.1:9464", "prometheus:9090")


def _extreme_records() -> list[bytes]:
    """Lines in which one value after the other is extreme; the first of each is accepted."""
    plain: dict[str, Any] = {
        **{"peer_id": "Qm", "name": "a", "addresses": ["/ip4/45.1.2.3/tcp/5"], "config": "c", "state": "training"},
        **{"step": 1, "round": 1, "tokens_per_second": 1.0, "metrics": "45.1.2.3:9464", "taken": 1},
    }
    report = {
        **{"version": "1", "tokens": 1, "train_loss": 1.0, "val_loss": 1.0, "seconds": 99.0, "idle_seconds": 1.0},
        **{"members": 1, "partners": ["a"], "merges": 3, "merged_ago": 9.0, "refused": [["a", 3]]},
    }
    marks = [(plain | {key: "MARK", "report": report}) for key in plain if key != "peer_id"]
    marks += [(plain | {"report": report | {key: "MARK"}}) for key in report]
    whole = json.dumps(plain | {"report": report})
    lines = [[whole, *(json.dumps(it).replace('"MARK"', value) for value in EXTREMES)] for it in marks]
    addressed = [
        json.dumps(plain | {"metrics": place, "addresses": [f"/ip4/{place.partition(':')[0]}/tcp/5"]})
        for place in PLACES
    ]
    return ["\n".join(it).encode() for it in [*lines, [whole, *addressed]]]


def targets() -> dict[str, Target]:
    """By name."""
    own = _authority().admission.own
    good = Invitation(certificate=_authority().admission.own, owner=_authority().admission.owner, identity="AAAA")
    return {
        "message": Target(message, _messages()),
        "relayed": Target(relayed, [bytes.fromhex("1a080112160a1400010203") + bytes(17), b"/ip4/45.1.2.3/tcp/31337"]),
        "whereabouts": Target(whereabouts, [b"\x07\x08\x04\x12\x03key", b"\x02\x08\x05"]),
        "payload": Target(payload, [bytes([kind]) + bytes(64) for kind in range(len(CODECS))]),
        "record": Target(record, _records()),
        "certificate": Target(certificate, [f"{own.peer_id}\0{own.model_dump_json()}".encode()]),
        "request": Target(request, _requests()),
        "answer": Target(answer, _answers()),
        "extensions": Target(extensions, _extensions()),
        "monitor": Target(monitor, _extreme_records()),
        "invitation": Target(invitation, [good.model_dump_json().encode()]),
        "joined": Target(joined, _runs()),
        "config": Target(config, [yaml.safe_dump(json.loads(Config().model_dump_json())).encode(), b"run: {}\n"]),
    }
