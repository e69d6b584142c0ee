"""Records, meetings, deadlines and estimates: the pure half of the swarm."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from hivemind.utils import ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peer import __version__, clock
from peer.exchange.deadline import DEADLINE_FACTOR, DEADLINE_FLOOR, Deadline
from peer.rounds.progress import Progress
from peer.swarm.directory import reader, records
from peer.swarm.directory.reader import Reader
from peer.swarm.directory.records import MemberRecord
from peer.swarm.pairing.agreement import Meeting, Propose
from tests.unit.virtual import run, stream_pair


def record(**changes: object) -> MemberRecord:
    values: dict[str, object] = {
        **{"peer_id": "QmA", "name": "a", "addresses": ["/ip4/127.0.0.1/tcp/1"], "config": "c", "state": "training"},
        **{"step": 1, "round": 1, "tokens_per_second": 1.0, "metrics": None},
    }
    return MemberRecord.model_validate({**values, **changes})


@given(st.text(max_size=64), st.lists(st.text(max_size=128), max_size=8))
def test_a_record_fits_into_its_bytes_and_comes_back(name: str, addresses: list[str]) -> None:
    text = records.encode(record(name=name, addresses=addresses))
    back = records.decode("QmA", text)
    if len(text.encode()) > records.RECORD_BYTES:  # only a name of four-byte characters can be that long
        assert not MemberRecord.model_validate_json(text).addresses
        return
    assert back is not None
    assert back.name == name
    assert back.addresses == addresses[: len(back.addresses)]


@given(st.one_of(st.none(), st.integers(), st.binary(), st.text(), st.just("[" * 900)), st.text())
def test_whatever_stands_in_the_directory_is_read_or_dropped(value: object, subkey: str) -> None:
    assert records.decode(subkey, value) is None


def test_nobody_can_speak_under_another_peers_key() -> None:
    assert records.decode("QmA", records.encode(record())) == record()
    assert records.decode("QmB", records.encode(record())) is None


OLD = (
    '{"peer_id":"QmA","name":"cone","addresses":[],"config":"c","state":"training","step":1,"round":10000,'
    '"boundary_in":0.5,"tokens_per_second":1.0,"metrics":null,"report":{"version":"0.1.0","tokens":7},"new":[]}'
)


def test_of_another_versions_record_only_name_and_version_are_believed() -> None:
    assert records.decode("QmA", OLD) is None
    assert records.program_of("QmA", OLD) == ("cone", "0.1.0")
    assert records.program_of("QmB", OLD) is None  # not under another peer's key
    assert records.program_of("QmA", OLD.replace("cone", "co\\nne")) is None  # two lines in a log
    assert records.program_of("QmA", OLD.replace("cone", "x" * 65)) is None


def test_a_peer_of_another_version_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("noloco").propagate = True
    own = OLD.replace("QmA", "QmMe")

    class Directory:
        async def get_many(self, keys: list[str], **options: object) -> dict[str, object]:
            stored = {f"Qm{n}": OLD.replace("QmA", f"Qm{n}") for n in range(5)}
            values = {subkey: ValueWithExpiration(text, 2e9) for subkey, text in [*stored.items(), ("QmMe", own)]}
            return {key: ValueWithExpiration(values, 2e9) for key in keys}

    monkeypatch.setattr(reader, "FOREIGN_PEERS", 3)
    node = SimpleNamespace(dht=Directory(), peer_id="QmMe", subkey="QmMe")
    found = Reader(node, "run")  # type: ignore[arg-type]
    for _ in range(2):
        asyncio.run(found.look(1))
    assert not found.known
    said = f"peer cone runs version 0.1.0, this is {__version__}"
    assert caplog.text.count(said) == 3


@pytest.mark.parametrize("eta", [-1.0, float("inf"), float("nan"), 1e9])
def test_an_absurd_time_is_not_a_proposal(eta: float) -> None:
    with pytest.raises(ValidationError):
        Propose(name="a", round=0, eta=eta, phase=1.0)


def test_a_partners_time_runs_out() -> None:
    async def meet() -> tuple[float, float]:
        one, _ = await stream_pair()
        meeting = Meeting(one, "b", 20.0)
        await asyncio.sleep(15.0)
        first = meeting.their_eta()
        await asyncio.sleep(10.0)
        meeting.settle(False)
        meeting.settle(True)  # the first call counts
        assert meeting.came.result() is False
        return first, meeting.their_eta()

    assert run(meet()) == (pytest.approx(5.0), 0.0)


def test_a_deadline_follows_the_swaps_that_were_seen() -> None:
    deadline = Deadline(120.0)
    assert deadline.seconds == 120.0
    deadline.observe(0.1)
    assert deadline.seconds == DEADLINE_FLOOR
    deadline.observe(10.0)
    assert deadline.seconds == DEADLINE_FACTOR * 10.0
    deadline.observe(1000.0)
    assert deadline.seconds == 120.0
    for _ in range(10):
        deadline.observe(2.0)
    assert deadline.seconds == DEADLINE_FACTOR * 2.0


@pytest.mark.usefixtures("virtual")
def test_the_next_boundary_is_estimated_from_the_steps_so_far() -> None:
    progress = Progress()
    assert progress.eta() is None and progress.phase_seconds is None and progress.rate(10) == 0
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
    progress.begin(10, 10, limit=7.0)
    assert progress.eta() == progress.phase_seconds == pytest.approx(7.0)
