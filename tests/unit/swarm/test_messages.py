"""Records, meetings, deadlines and estimates: the pure half of the swarm."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from secrets import token_hex
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer, ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peer import __version__, clock
from peer.p2p.dht.search import id_of
from peer.p2p.stream import MESSAGE_CAP, Message
from peer.rounds.progress import Progress
from peer.rounds.state import MAX_MEMBERS, ROOT_BYTES
from peer.rounds.types import NAME, Seat
from peer.swarm.directory import reader, records
from peer.swarm.directory.buckets import Bucket, bucket_of
from peer.swarm.directory.reader import Reader
from peer.swarm.directory.records import MemberRecord, Report
from peer.swarm.grouping.messages import LeaderNotice, Roster, fitting
from peer.swarm.pairing.agreement import Accept, Meeting, Propose
from peer.swarm.state_transfer.donor import StateHeader
from tests.unit.virtual import stream_pair


def record(**changes: object) -> MemberRecord:
    values: dict[str, object] = {
        **{"peer_id": "QmA", "name": "a", "addresses": ["/ip4/127.0.0.1/tcp/1"], "config": "c", "state": "training"},
        **{"step": 1, "round": 1, "tokens_per_second": 1.0, "metrics": None},
    }
    return MemberRecord.model_validate({**values, **changes})


@given(st.from_regex(NAME, fullmatch=True), st.lists(st.text(max_size=128), max_size=8))
def test_a_record_fits_into_its_bytes_and_comes_back(name: str, addresses: list[str]) -> None:
    back = records.decode("QmA", records.encode(record(name=name, addresses=addresses)))
    assert back is not None
    assert back.name == name
    assert back.addresses == addresses[: len(back.addresses)]


@given(st.one_of(st.none(), st.integers(), st.binary(), st.text(), st.just("[" * 900)), st.text())
def test_whatever_stands_in_the_directory_is_read_or_dropped(value: object, subkey: str) -> None:
    assert records.decode(subkey, value) is None


ODD_NAMES = (
    "",
    "a\nb",
    "a\n",
    "a\x1b[2J",
    "\u202etxt",
    "a\u2028b",
    "a b",
    "-a",
    "\x00",
    "é",
    "z\u0301",
    "a" * 65,
    "<b>",
)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_name_is_one_plain_word_in_every_message(name: str) -> None:
    """So that it can stand in a line, a label and a file name; the configuration allows no other."""
    said: list[tuple[type[Message], dict[str, object]]] = [
        (MemberRecord, record(root="0").model_dump() | {"name": name}),
        (Report, {"partners": (name,)}),
        (Report, {"refused": ((name, 1),)}),
        (Propose, {"name": name, "round": 1, "eta": 1.0, "phase": 1.0}),
        (LeaderNotice, {"seat": {"peer_id": "QmA", "name": name}, "established": True}),
    ]
    for kind, values in said:
        text = json.dumps(values)
        with pytest.raises(ValidationError, match="pattern"):
            kind.model_validate_json(text)
        kind.model_validate_json(text.replace(json.dumps(name), '"peer-1.A_b"'))


@pytest.mark.parametrize("root", ["\0" * 16, "0" * 17, "0\n", "A", "-1", " "], ids=ascii)
def test_a_root_is_as_one_that_a_peer_draws(root: str) -> None:
    """The smallest one becomes everybody's: 32 zero bytes took 192 bytes of each record, so reports named nobody."""
    said: list[tuple[type[Message], dict[str, object]]] = [
        (MemberRecord, record().model_dump()),
        (Propose, {"name": "a", "round": 1, "eta": 1.0, "phase": 1.0}),
        (Accept, {"eta": 1.0}),
        (StateHeader, {**dict.fromkeys(("step", "round", "phase_steps_done", "first"), 0), "lineage": ("", 0)}
                      | {"vectors": 1, "numel": 1}),
    ]  # fmt: skip
    for kind, values in said:
        for drawn in ("", token_hex(ROOT_BYTES)):
            kind.model_validate_json(json.dumps(values | {"root": drawn}))
        with pytest.raises(ValidationError, match="root"):
            kind.model_validate_json(json.dumps(values | {"root": root}))


@pytest.mark.parametrize("name", [*ODD_NAMES, 7, None])
def test_an_onlooker_reads_only_runs_with_a_plain_name(name: object) -> None:
    """Anybody writes names of runs; they become headings, labels and keys."""
    asked: set[DHTID] = set()

    def get(key: DHTID) -> object:
        asked.add(key)
        if key != id_of(records.RUNS):
            return None
        held = DictionaryDHTValue()
        for number, value in enumerate((name, "demo")):
            held.store(str(number), msgpack.packb(value, unicode_errors="surrogatepass"), 1e12)
        return ValueWithExpiration(held, 1e12)

    node = SimpleNamespace(dht=alone(get), peer_id="QmMe", anchors=list)
    assert asyncio.run(reader.Onlooker(node).look()) == {}  # type: ignore[arg-type]
    assert id_of("demo/members/0/0") in asked
    assert id_of(f"{name}/members/0/0") not in asked


@pytest.mark.parametrize("answers", [True, False])
def test_an_onlooker_says_whether_another_node_has_answered(answers: bool) -> None:
    dht, other = alone(lambda _: None), DHTID.generate(source="other")

    async def call(_: object, keys: list[DHTID]) -> object:
        return {key: (None, {}) for key in keys} if answers else None

    dht._call_find_with_blacklist, dht.protocol.client_mode = call, False
    dht.protocol.routing_table.get_nearest_neighbors = lambda *_, **__: [(other, "QmOther")]
    onlooker = reader.Onlooker(SimpleNamespace(dht=dht, peer_id="QmMe", anchors=list))  # type: ignore[arg-type]
    assert onlooker.alone and asyncio.run(onlooker.look()) == {}
    assert onlooker.alone is not answers


def alone(get: Callable[[DHTID], object]) -> SimpleNamespace:
    """hivemind's DHT node without neighbours; ``get``: what it has itself."""
    table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: [])
    protocol = SimpleNamespace(routing_table=table, storage=SimpleNamespace(get=get), client_mode=True)
    return SimpleNamespace(protocol=protocol, node_id=DHTID.generate(source="me"), peer_id="QmMe")


HUGE = (
    "9" * 400,
    "9" * 5000,
    str(2**53 + 1),
    "-1",
    "1.7e308",
    "-1.7e308",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1e-400x",
)
FIELDS = ("step", "round", "taken", "tokens_per_second")
REPORTED = ("tokens", "members", "merges", "seconds", "idle_seconds", "merged_ago", "train_loss", "val_loss")


@pytest.mark.parametrize("value", HUGE, ids=lambda text: text[:20])
@pytest.mark.parametrize("field", [*FIELDS, *REPORTED])
def test_a_number_that_no_peer_reaches_is_refused(field: str, value: str) -> None:
    if field.endswith("_loss") and value in ("-1", str(2**53 + 1)):
        return  # a loss may be negative, and large
    if field == "tokens_per_second" or "seconds" in field or field == "merged_ago":
        value = "1e13" if value == str(2**53 + 1) else value
    marked = record(report={field: 12345} if field in REPORTED else {}, **({field: 12345} if field in FIELDS else {}))
    text = re.sub(r"12345(\.0)?", "{}", marked.model_dump_json(), count=1)
    assert records.decode("QmA", text.replace("{}", "1")) is not None
    assert records.decode("QmA", text.replace("{}", value)) is None


def test_what_the_largest_swarm_could_say_is_accepted() -> None:
    most = record(
        **dict.fromkeys(("step", "round", "taken"), 2**53),
        tokens_per_second=1e12,
        report={"tokens": 2**53, "seconds": 1e10, "idle_seconds": 1e10, "merged_ago": 1e10, "train_loss": 3.4028235e38},
    )
    assert records.decode("QmA", records.encode(most)) == most


def test_nobody_can_speak_under_another_peers_key() -> None:
    assert records.decode("QmA", records.encode(record())) == record()
    assert records.decode("QmB", records.encode(record())) is None


OLD = (
    '{"peer_id":"QmA","name":"cone","addresses":[],"config":"c","state":"training","step":1,"round":10000,'
    '"boundary_in":0.5,"tokens_per_second":1.0,"metrics":null,"report":{"version":"0.1.0","tokens":7},"new":[]}'
)


def test_of_another_versions_record_only_name_and_version_are_believed() -> None:
    assert records.decode("QmA", OLD) is None
    assert records.program_of("QmA", OLD) == ("QmA", "cone", "0.1.0")
    assert records.program_of("QmB", OLD) is None  # not under another peer's key
    assert records.program_of("QmA", OLD.replace("cone", "co\\nne")) is None  # two lines in a log
    assert records.program_of("QmA", OLD.replace("cone", "x" * 65)) is None


def test_a_peer_of_another_version_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("noloco").propagate = True
    own = OLD.replace("QmA", "QmMe")

    def stored(key: DHTID) -> ValueWithExpiration[object]:
        if key == id_of(records.RUNS):
            return ValueWithExpiration({"Qm0": (MSGPackSerializer.dumps("run"), 2e9)}, 2e9)
        texts = {f"Qm{n}": OLD.replace("QmA", f"Qm{n}") for n in range(5)} | {"QmMe": own}
        packed = {subkey: (MSGPackSerializer.dumps(text), 2e9) for subkey, text in texts.items()}
        return ValueWithExpiration(packed, 2e9)

    monkeypatch.setattr(reader, "FOREIGN_PEERS", 3)
    node = SimpleNamespace(dht=alone(stored), peer_id="QmMe", subkey="QmMe", anchors=list)
    found = Reader(node, "run")  # type: ignore[arg-type]
    for _ in range(2):
        asyncio.run(found.look(1))
    assert not found.known
    said = f"peer cone runs version 0.1.0, this is {__version__}"
    assert caplog.text.count(said) == 3
    caplog.clear()
    onlooker = reader.Onlooker(node)  # type: ignore[arg-type]
    for _ in range(3):  # an invented run is forgotten after each look, and filled the log
        assert asyncio.run(onlooker.look()) == {}
    assert caplog.text.count(said) == 3


def test_a_record_counts_in_its_authors_bucket_alone() -> None:
    """One id counted in each bucket in which it lay: 64 of them made six members believe in a thousand."""
    other = "QmA"

    def stored(key: DHTID) -> ValueWithExpiration[object]:
        return ValueWithExpiration({other: (MSGPackSerializer.dumps(records.encode(record(peer_id=other))), 2e9)}, 2e9)

    node = SimpleNamespace(dht=alone(stored), peer_id="QmMe", subkey="QmMe", anchors=list)
    found = Reader(node, "run")  # type: ignore[arg-type]
    own = bucket_of(other, 3)
    counted = asyncio.run(found._take_in([Bucket(3, place) for place in range(8)], 1))
    assert counted == {Bucket(3, place): int(place == own.place) for place in range(8)} and set(found.known) == {other}


@pytest.mark.parametrize("eta", [-1.0, float("inf"), float("nan"), 1e9])
def test_an_absurd_time_is_not_a_proposal(eta: float) -> None:
    with pytest.raises(ValidationError):
        Propose(name="a", round=0, eta=eta, phase=1.0)


async def test_a_partners_time_runs_out() -> None:
    one, _ = await stream_pair()
    meeting = Meeting(one, "b", 20.0, 20.0)
    await asyncio.sleep(15.0)
    first = meeting.their_eta()
    await asyncio.sleep(10.0)
    meeting.resolve(False)
    meeting.resolve(True)  # the first call counts
    assert meeting.came.result() is False
    assert (first, meeting.their_eta()) == (pytest.approx(5.0), 0.0)


@pytest.mark.usefixtures("virtual")
def test_the_next_boundary_is_estimated_from_the_steps_so_far() -> None:
    progress = Progress()
    assert progress.eta() is None and progress.phase_seconds == 0 and progress.rate(10) == 0
    progress.begin(10, 10)
    for _ in range(4):
        clock.sleep(2.0)
        progress.tick()
    assert progress.eta() == pytest.approx(6 * 2.0)
    assert progress.phase_seconds == pytest.approx(10 * 2.0)
    assert progress.rate(10) == pytest.approx(10 / 2.0)
    clock.sleep(5.0)
    assert progress.eta() == pytest.approx(7.0)
    clock.sleep(10.0)
    assert progress.eta() == 0.0


@pytest.mark.usefixtures("virtual")
def test_a_phase_that_ends_after_a_time_ends_with_the_step_that_runs_then() -> None:
    """It was announced for the middle of that step, and who was late by the rest of it was left out."""
    progress = Progress()
    progress.begin(10, 10)
    for _ in range(4):
        clock.sleep(2.0)
        progress.tick()
    for remaining, steps in (10, 4), (5, 2), (1, 1):
        progress.begin(remaining, 10, limit=7.0)
        assert progress.eta() == pytest.approx(2.0 * steps)
        assert progress.phase_seconds == pytest.approx(8.0)  # of a whole one, to the end of its last step
        clock.sleep(2.0)
        progress.tick()
        assert progress.eta() == pytest.approx(2.0 * (steps - 1))
        clock.sleep(0.5)
        assert progress.eta() == pytest.approx(max(0.0, 2.0 * (steps - 1) - 0.5))


@pytest.mark.usefixtures("virtual")
def test_a_boundary_that_waits_for_a_swap_is_postponed_by_phases_that_end_after_a_time() -> None:
    """It was announced a whole H later: 110 s instead of 20."""
    progress = Progress()
    progress.begin(100, 100)
    clock.sleep(1.0)
    progress.tick()
    progress.swap_took(15.0)
    progress.begin(100, 100, limit=10.0)
    progress.swap_begins()
    assert progress.eta() == pytest.approx(20.0)


@pytest.mark.usefixtures("virtual")
def test_no_boundary_is_announced_for_the_time_of_a_swap_that_runs() -> None:
    """It would be postponed by a phase, and who was told so would wait for nothing."""
    progress = Progress()
    progress.begin(10, 10)
    for _ in range(4):
        clock.sleep(2.0)
        progress.tick()
    progress.swap_begins()
    assert progress.eta() is None  # the first one: it may take any time
    for seconds, postponed in ((11.0, 0), (13.0, 1), (33.0, 2)):
        progress.swap_took(seconds)
        assert progress.eta() == pytest.approx(12.0)
        progress.swap_begins()
        assert progress.eta() == pytest.approx(12.0 + postponed * 20.0), seconds
    progress.swap_took(0.0)
    assert progress.eta() == pytest.approx(12.0)
    progress.swap_begins()
    for following, eta in ((3, 36.0), (0, 33.0)):  # steps of the next phase; the last boundary waits for the swap
        progress.begin(6, 10, following=following)
        assert progress.eta() == pytest.approx(eta)


@pytest.mark.usefixtures("virtual")
def test_a_phase_and_a_swap_that_end_while_the_boundary_is_asked_for_are_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training thread ends them. The error that came of it ended the search for partners, for good."""
    progress = Progress()
    progress.begin(10, 10)
    progress.step_seconds = 2.0
    progress.swap_took(33.0)
    progress.swap_begins()
    now, eta = clock.monotonic(), progress.eta()

    def ends() -> float:
        progress.suspend()
        progress.swap_took(0.0)
        return now

    monkeypatch.setattr(clock, "monotonic", ends)
    assert progress.eta() == eta == pytest.approx(40.0)
    assert progress.eta() is None


@pytest.mark.usefixtures("virtual")
def test_a_swap_that_is_late_is_expected_to_be_late_for_as_long_again() -> None:
    """It was believed to end at once: the boundary was announced, and postponed without a word."""
    progress = Progress()
    progress.begin(10, 10)
    for _ in range(4):
        clock.sleep(2.0)
        progress.tick()
    progress.swap_took(1.0)
    progress.swap_begins()
    for late, eta in ((5.0, 6.0), (6.5, 24.5)):  # the boundary is in 6 s, then in 4.5 s: a phase of 20 s later
        clock.sleep(1.0 + late if late == 5.0 else 1.5)
        assert progress.eta() == pytest.approx(eta)


def test_the_roster_of_the_largest_group_can_be_sent() -> None:
    addresses = tuple(f"/ip6/2001:db8::{number:x}/tcp/31337" for number in range(8))
    seats = [Seat(f"Qm{number:044}", 64 * "x", addresses) for number in range(MAX_MEMBERS)]
    small = Roster(token="t", members=seats[:40], round=0, phase=1.0)
    assert fitting(small) is small
    roster = fitting(Roster(token="t", members=seats, round=0, phase=1.0))
    assert len(roster.model_dump_json().encode()) <= MESSAGE_CAP
    assert [seat.peer_id for seat in roster.members] == [seat.peer_id for seat in seats]
