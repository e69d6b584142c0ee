"""Certificates, the gate, the rules of the DHT and the owner's book: nobody gets in whom the owner has not invited."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import string
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import PingRequest, PingResponse
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dht_bootstrap import owner as book
from peer import clock
from peer.errors import RunError, UserError
from peer.p2p import identity
from peer.p2p.admission.dht_rules import CERTIFICATE_CAP, REVOCATIONS, Authority, _certificate, decode_revocations
from peer.p2p.admission.gate import Gate
from peer.p2p.admission.invitation import Admission, Certificate, Owner, Revocations, accept, invite
from peer.p2p.dht.authors import Author, owner_of_subkey, peer_id_of
from peer.p2p.dht.requests import RefusedRequest, Requests
from peer.p2p.greeting import guest_node, guest_settings
from peer.p2p.stream import BadMessage, StreamLost
from peer.rounds.backoff import Proven
from tests.unit.virtual import stream_pair

OWNER, STRANGER = Owner(Ed25519PrivateKey.generate()), Owner(Ed25519PrivateKey.generate())
PEER, OTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmTzQ1JRkWErjk39mryYw2WVaphAZNAREyMchXzYQ7c15n"
LATER = time.time() + 1000
TEXT = st.text(string.printable, max_size=64)
OWN = OWNER.certify(PEER, "me", LATER)


def admission(owner: Owner = OWNER, own: Certificate = OWN) -> Admission:
    return Admission(owner.public, own)


def test_a_certificate_admits_its_peer_until_it_expires_or_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(clock, "unix", lambda: now[0])
    it = admission()
    certificate = OWNER.certify(OTHER, "other", 2000.0)
    assert it.objection(certificate, OTHER) == ""
    assert "another peer" in it.objection(certificate, PEER)
    assert "not signed" in it.objection(STRANGER.certify(OTHER, "other", 2000.0), OTHER)
    now[0] = 2000.0
    assert "expired" in it.objection(certificate, OTHER)
    now[0] = 1000.0
    assert it.learn(OWNER.revoke(5, [OTHER]))
    assert "revoked" in it.objection(certificate, OTHER)


@given(st.sampled_from(["peer_id", "name", "expires", "signature"]), st.data())
def test_no_field_of_a_certificate_can_be_changed(key: str, data: st.DataObject) -> None:
    changes = {
        "peer_id": st.just(OTHER),
        "name": TEXT.filter(lambda it: it != OWN.name),
        "expires": st.floats(LATER + 1, 1e11),
        "signature": TEXT.filter(lambda it: it != OWN.signature),
    }
    changed = OWN.model_copy(update={key: data.draw(changes[key])})
    assert admission().objection(changed, changed.peer_id)


def test_only_the_owners_newest_list_counts_and_a_certificate_is_no_list() -> None:
    it = admission()
    assert not it.learn(STRANGER.revoke(9, [OTHER]))
    assert it.learn(OWNER.revoke(3, [OTHER]))
    assert not it.learn(OWNER.revoke(2, []))
    assert not it.learn(Revocations(number=7, peer_ids=[], signature=OWN.signature))
    assert it.learn(OWNER.revoke(4, []))
    assert it.objection(OWNER.certify(OTHER, "o", LATER), OTHER) == ""


VALUES = st.none() | TEXT | st.floats()
KEYS = st.sampled_from(["peer_id", "name", "expires", "signature", "x"])
NONSENSE = st.binary(max_size=300) | st.dictionaries(KEYS, VALUES).map(lambda it: json.dumps(it).encode())


@settings(max_examples=300)
@given(NONSENSE)
def test_any_bytes_are_a_certificate_or_refused(data: bytes) -> None:
    with pytest.raises(ValidationError):
        Certificate.model_validate_json(data)
    assert decode_revocations(data.decode(errors="replace")) is None


# -- streams


def meet(one: Admission, two: Admission) -> tuple[str, str]:
    """Both ends of a stream show and check; what each says of the other."""

    async def check(gate: Gate, stream: object) -> str:
        try:
            await gate.check(stream)  # type: ignore[arg-type]
        except (StreamLost, BadMessage) as error:
            return str(error)
        return ""

    async def talk() -> tuple[str, str]:
        caller, called = await stream_pair()
        caller.remote, called.remote = two.own.peer_id, one.own.peer_id
        gates = Gate(one), Gate(two)
        await asyncio.gather(gates[0].show(caller), gates[1].show(called))
        return await check(gates[0], caller), await check(gates[1], called)

    return asyncio.run(talk())


def test_a_stream_is_for_two_that_are_both_invited() -> None:
    other = OWNER.certify(OTHER, "other", LATER)
    assert meet(admission(), admission(own=other)) == ("", "")
    assert "not signed" in meet(admission(), admission(STRANGER, STRANGER.certify(OTHER, "o", LATER)))[0]
    assert "expired" in meet(admission(), admission(own=OWNER.certify(OTHER, "o", 5.0)))[0]


@pytest.mark.real_time
async def test_nothing_is_heard_from_who_does_not_show_a_certificate() -> None:
    caller, called = await stream_pair()
    called.gate = Gate(admission()).check
    await caller.write(b"\0\0\0\2{}" + bytes(100), 1)
    with pytest.raises(BadMessage):
        await called.read_into(memoryview(bytearray(50)), 1)


@pytest.mark.real_time
@pytest.mark.parametrize("ends", ["by the owner's list", "with the time"])
async def test_open_streams_end_with_the_invitation(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those on which a peer shows no certificate, as the circuits that a relay joins."""
    now = [1000.0]
    monkeypatch.setattr(clock, "unix", lambda: now[0])
    it = admission()
    gate, streams = Gate(it), []
    for name, expires, shows in ((OTHER, 2000.0, True), (OTHER, 2000.0, False), (PEER, 3000.0, True)):
        caller, called = await stream_pair()
        called.remote = name
        streams.append(called)
        if shows:
            await Gate(admission(own=OWNER.certify(name, "o", expires))).show(caller)
            await gate.check(called)
    gate.look_again(streams)
    assert not any(stream.closed for stream in streams)
    if ends == "with the time":
        now[0] = 2000.0
    else:
        it.learn(OWNER.revoke(1, [OTHER]))
    gate.look_again(streams)
    assert [stream.closed for stream in streams] == [True, True, False]


# -- the DHT


@pytest.fixture
def invited(tmp_path: Path) -> Callable[[str], Authority]:
    def make(name: str, owner: Owner = OWNER) -> Authority:
        invitation = invite(owner, name, LATER)
        file, key = tmp_path / f"{name}.invitation", tmp_path / f"{name}.key"
        file.write_text(invitation.model_dump_json())
        certificate = accept(file, key, owner.public).certificate
        assert identity.load_or_create(key) == certificate.peer_id
        assert key.stat().st_mode & 0o77 == 0
        return Authority(Admission(owner.public, certificate), key)

    return make


def test_requests_of_the_uninvited_are_not_answered(invited: Callable[..., Authority]) -> None:
    one, two, stranger = invited("one"), invited("two"), invited("three", STRANGER)

    def ask(client: Authority, server: Authority, caller: Authority | None = None) -> bool:
        """``caller``: whose connection it is, by default the client's."""
        request, response = PingRequest(), PingResponse()
        ends = [PeerID.from_base58(it.admission.own.peer_id) for it in (caller or client, server)]
        asks, answers = Requests(client, Proven()), Requests(server, Proven())
        try:
            asks.ours(request)
            answers.check_request(request, ends[0])
            answers.ours(response)
            asks.check_answer(request, response, ends[1])
        except RefusedRequest as error:
            assert str(error) == "not invited"
            return False
        return True

    assert ask(one, two)
    assert not ask(one, two, caller=stranger), "a member's request that another passes on"
    assert not ask(stranger, two)
    assert not ask(one, stranger)
    two.admission.learn(OWNER.revoke(1, [one.admission.own.peer_id]))
    assert not ask(one, two)
    assert not ask(two, one), "who is called is asked for its certificate too"


def test_a_text_that_is_too_long_for_a_certificate_is_not_remembered(invited: Callable[..., Authority]) -> None:
    """Anybody may send one of 640 kB, and 4,096 of them were kept: 2.6 GB."""
    one, certificate = invited("one"), OWNER.certify(OTHER, "other", LATER).model_dump_json()
    _certificate.cache_clear()
    for length, kept in ((CERTIFICATE_CAP + 1, False), (CERTIFICATE_CAP, True)):
        request = PingRequest()
        request.auth.client_access_token.username = certificate.ljust(length)
        with contextlib.nullcontext() if kept else pytest.raises(RefusedRequest, match="not invited"):
            Requests(one, Proven()).check_request(request, PeerID.from_base58(OTHER))
        assert _certificate.cache_info().currsize == kept


def test_who_has_shown_its_certificate_is_welcome_until_it_is_revoked(invited: Callable[..., Authority]) -> None:
    """Who is not does not learn who is there (dht/whereabouts.py)."""
    one, two = invited("one"), invited("two")
    peer_id, server = one.admission.own.peer_id, Requests(two, Proven())
    assert not server.welcome(peer_id)
    Requests(one, Proven()).ours(request := PingRequest())
    server.check_request(request, PeerID.from_base58(peer_id))
    assert server.welcome(peer_id) and not server.welcome(OTHER)
    two.admission.learn(OWNER.revoke(1, [peer_id]))
    assert not server.welcome(peer_id)


def record(writer: Author, subkey: object, key: str = "run/members/0/0", value: str = "{}") -> DHTRecord:
    pack = MSGPackSerializer.dumps
    blank = DHTRecord(DHTID.generate(source=key).to_bytes(), pack(subkey), pack(value), time.time() + 30)
    return DHTRecord(blank.key, blank.subkey, writer.validator.sign_value(blank), blank.expiration_time)


def test_each_member_writes_its_own_record_only(invited: Callable[..., Authority]) -> None:
    one, two, stranger = invited("one"), invited("two"), invited("three", STRANGER)
    own, others = (it.admission.own.peer_id for it in (one, two))
    mine = owner_of_subkey(own + one.tag)
    assert peer_id_of(mine.public.encode()) == mine.peer_id == own
    assert Certificate.model_validate_json(mine.certificate) == one.admission.own
    assert two.validator.validate(record(one, own + one.tag))
    assert not two.validator.validate(record(two, own + one.tag)), "not signed by its owner"
    assert not two.validator.validate(record(two, own + two.tag)), "under another's name"
    assert not two.validator.validate(record(stranger, stranger.admission.own.peer_id + stranger.tag)), "not invited"
    key, foreign = one.tag.partition("[invited:")[0], two.tag.partition("[invited:")[2]
    uninvited = (own + key, f"{own}{key}[invited:{foreign}", f"{own}{key}[invited:{{}}]")
    for subkey in (own, "x", None, 7, b"bytes", own + "[owner:junk]", "[owner:x", *uninvited):
        assert not two.validator.validate(record(one, subkey))
    two.admission.learn(OWNER.revoke(1, [own]))
    assert not two.validator.validate(record(one, own + one.tag)), "it outlives no revocation"
    assert two.validator.validate(record(two, others + two.tag))


def test_in_an_open_swarm_too(tmp_path: Path) -> None:
    writers = []
    for name in ("one", "two"):
        peer_id = identity.load_or_create(tmp_path / name)
        writers.append((peer_id, Author(tmp_path / name)))
    (own, one), (_, two) = writers
    good = record(one, own + one.tag)
    assert two.validator.validate(good)
    later = dataclasses.replace(good, expiration_time=good.expiration_time + 1)
    for bad in (later, record(two, own + one.tag), record(two, own + two.tag), record(one, own), record(one, None)):
        assert not two.validator.validate(bad)
    lines = (own + one.tag).replace("ssh-rsa", "ssh-rsa\n")
    assert not two.validator.validate(record(two, lines)), "hivemind finds no key in it and asks for no signature"


def test_a_key_whose_check_would_take_long_is_nobodys() -> None:
    for size, exponent in ((1024, 65537), (2048, 3)):
        key = rsa.generate_private_key(exponent, size).public_key()
        assert peer_id_of(key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)) == ""


def test_the_list_of_revocations_is_the_owners_and_never_an_older_one(invited: Callable[..., Authority]) -> None:
    it = invited("one")
    new, old = OWNER.revoke(5, [OTHER]).model_dump_json(), OWNER.revoke(4, []).model_dump_json()
    assert it.validator.validate(record(it, None, REVOCATIONS, new))
    assert it.admission.revocations.number == 5
    for value in (old, STRANGER.revoke(9, []).model_dump_json(), "{}", "x" * 100_000):
        assert not it.validator.validate(record(it, None, REVOCATIONS, value))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_key_or_nobodys(data: bytes) -> None:
    assert peer_id_of(data) == ""
    assert peer_id_of(b"ssh-rsa " + data) == ""


# -- files


def test_an_invitation_of_another_owner_or_none_at_all_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.invitation"
    with pytest.raises(UserError, match="No such file"):
        accept(file, tmp_path / "key", OWNER.public)
    foreign = invite(STRANGER, "x", LATER)
    lines = foreign.model_copy(update={"owner": "two\nlines"}).model_dump_json()
    for text in ("", "{}", "[1]", "\x00", json.dumps({"certificate": {}, "owner": 1, "identity": "!"}), lines):
        file.write_text(text)
        with pytest.raises(UserError, match="not an invitation"):
            accept(file, tmp_path / "key", OWNER.public)
    file.write_text(foreign.model_dump_json())
    with pytest.raises(UserError, match="its owner is"):
        accept(file, tmp_path / "key", OWNER.public)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, RunError), (errno.EDQUOT, RunError), (errno.EROFS, UserError)]
)
def test_an_invitation_that_a_full_disk_does_not_take_is_tried_again(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under systemd exit code 2 is the end of a peer. An error of a write names no file."""

    def broken(*_: object, **__: object) -> None:
        raise OSError(number, "broken")

    file, key = tmp_path / "x.invitation", tmp_path / "its.key"
    file.write_text(invite(OWNER, "x", LATER).model_dump_json())
    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(kind, match=r"^invitation .*/its\.key: broken"):
        accept(file, key, OWNER.public)
    monkeypatch.undo()
    accept(file, key, OWNER.public)


def test_an_expired_invitation_does_not_start(tmp_path: Path) -> None:
    file, key = tmp_path / "x.invitation", tmp_path / "key"
    file.write_text(invite(OWNER, "x", time.time() - 1).model_dump_json())
    certificate = accept(file, key, OWNER.public).certificate
    with pytest.raises(UserError, match="expired"):
        Authority(Admission(OWNER.public, certificate), key)


def test_an_empty_file_is_no_invitation_in_an_open_swarm(tmp_path: Path) -> None:
    """docker/compose.peer.yaml mounts one; ``status`` in its container took it for a broken invitation."""
    (empty := tmp_path / "empty").touch()
    for path in (empty, Path("/dev/null")):
        with guest_node(guest_settings([], 5), path) as (_, authority):
            assert authority is None
        with pytest.raises(UserError, match="not an invitation"), guest_node(guest_settings([], 5), path, OWNER.public):
            pass
    with pytest.raises(UserError, match="No such file"), guest_node(guest_settings([], 5), tmp_path / "none"):
        pass


def test_root_writes_a_book_that_the_bootstrap_node_s_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With systemd's unit only root can use the owner's commands; the node then kept its old revocations."""
    given: list[tuple[str, int, int]] = []
    key = tmp_path / "owner.key"
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append((Path(path).parent.name, uid, gid)))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    book.invite(key, "alice", 1, tmp_path / "alice.invitation")
    assert not given
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    book.revoke(key, "alice")
    assert given == [(tmp_path.name, key.stat().st_uid, key.stat().st_gid)]


def test_a_book_that_cannot_be_read_is_one_line_with_the_reason(tmp_path: Path) -> None:
    key = tmp_path / "owner.key"
    (tmp_path / "owner.key.book.json").mkdir()
    with pytest.raises(UserError, match="Is a directory; without it revoked"):
        book.read(key)
    (tmp_path / "owner.key.book.json").rmdir()
    (tmp_path / "owner.key.book.json").write_text("{")
    with pytest.raises(UserError, match="not a book; restore it"):
        book.read(key)


def test_the_owners_book(tmp_path: Path) -> None:
    key, out = tmp_path / "owner.key", tmp_path / "alice.invitation"
    assert "run.owner=" in book.invite(key, "alice", 1, out)
    assert {it.stat().st_mode & 0o77 for it in tmp_path.iterdir()} == {0}
    with pytest.raises(UserError, match="exists already"):
        book.invite(key, "alice", 1, out)
    it = Admission(book.load_or_create(key).public, OWN)
    book.publish(key, it)
    assert it.revocations.number == 0
    with pytest.raises(UserError, match="no invitation of that name"):
        book.revoke(key, "bob")
    book.revoke(key, "alice")
    book.publish(key, it)
    (entry,) = book.read(key).invited
    assert it.revocations.peer_ids == [entry.peer_id] and it.revocations.number > 0
    with pytest.raises(UserError, match="no invitation of that name"):
        book.revoke(key, "alice")
    key.write_text("junk")
    with pytest.raises(UserError, match="Ed25519"):
        book.load_or_create(key)


@pytest.mark.parametrize("make", [identity.load_or_create, book.load_or_create])
def test_a_full_disk_leaves_no_half_key(
    tmp_path: Path, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later start refused the empty file, and told its user to restore a backup. A service tries again."""
    key = tmp_path / "some.key"

    def full(path: Path | str, *_: object, **__: object) -> None:
        Path(path).write_bytes(b"ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"some\.key: No space left on device"):
        patch.setattr(identity.P2P, "generate_identity", full)
        patch.setattr(Path, "write_text", full)
        make(key)
    assert not key.exists()
    make(key)
    assert key.stat().st_mode & 0o077 == 0 and list(tmp_path.iterdir()) == [key]
