"""Records, meetings, deadlines and estimates: the pure half of the swarm."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peer.config.digest import canonical
from peer.config.schema import InnerConfig, RunConfig
from peer.exchange.deadline import DEADLINE_FACTOR, DEADLINE_FLOOR, Deadline
from peer.rounds.pairing_rule import LAST_CALL, MET_LAST, askable, near
from peer.rounds.progress import Progress
from peer.swarm.directory import records
from peer.swarm.directory.records import MemberRecord
from peer.swarm.pairing.messages import Meeting, Propose
from peer.swarm.party import Party
from tests.unit.exchange.pair_harness import stream_pair

SECONDS = st.floats(0, 1e4)


def record(**changes: object) -> MemberRecord:
    values: dict[str, object] = {
        **{"peer_id": "QmA", "name": "a", "addresses": ["/ip4/127.0.0.1/tcp/1"], "config": "c", "state": "training"},
        **{"step": 1, "round": 1, "boundary_in": 0.5, "tokens_per_second": 1.0, "metrics": None},
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


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0, 1))
def test_two_peers_agree_on_whether_they_are_near(a: float, b: float, p: float, q: float, window: float) -> None:
    assert near(a, b, p, q, window) == near(b, a, q, p, window)
    assert near(a, a, p, q, window)


@pytest.mark.parametrize("eta", [-1.0, float("inf"), float("nan"), 1e9])
def test_an_absurd_time_is_not_a_proposal(eta: float) -> None:
    with pytest.raises(ValidationError):
        Propose(name="a", run="r", config="c", round=0, eta=eta, phase=1.0)


def test_a_different_configuration_is_told_once_a_peer(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("noloco").propagate = True
    me = Party("me", "demo", "c", canonical(RunConfig()))
    theirs = canonical(RunConfig(inner=InnerConfig(learning_rate=0.5)))
    for name in ("x", "x", "y"):
        me.warn_of_difference(name, theirs)
    assert caplog.text.count("run.inner.learning_rate is 0.001 here and 0.5 there") == 2


def test_a_partners_time_runs_out() -> None:
    async def meet() -> tuple[float, float]:
        one, _ = await stream_pair()
        meeting = Meeting(one, "b", 0.2)
        first = meeting.their_eta()
        await asyncio.sleep(0.25)
        meeting.settle(False)
        meeting.settle(True)  # the first word counts
        assert meeting.word.result() is False
        return first, meeting.their_eta()

    first, last = asyncio.run(meet())
    assert 0.1 < first <= 0.2
    assert last == 0.0


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


def test_the_next_boundary_is_estimated_from_the_steps_so_far() -> None:
    progress = Progress()
    assert progress.eta() is None and progress.phase_seconds is None and progress.rate(10) == 0
    progress.begin(10, 10)
    for _ in range(4):
        time.sleep(0.02)
        progress.tick()
    eta, phase = progress.eta(), progress.phase_seconds
    assert eta is not None and phase is not None
    assert 0.1 < eta < 0.4  # six steps of a bit over 0.02 s
    assert 1.3 < phase / eta < 2.1
    assert progress.rate(10) == pytest.approx(10 / (phase / 10))
    time.sleep(0.5)
    assert progress.eta() == 0.0


@given(st.integers(1, 50), st.floats(0, 1), st.floats(0.3, 0.8))
def test_who_was_met_longest_ago_is_asked_first_and_all_are_at_last(count: int, left: float, opens: float) -> None:
    candidates = list(range(count))
    due = list(askable(candidates, left, opens))
    assert due == candidates[: len(due)]
    assert (due == []) == (left > max(opens, LAST_CALL))
    assert len(askable(candidates, left / 2, opens)) >= len(due)
    assert left > LAST_CALL or due[: count - 1] == candidates[: count - 1]
    assert left > MET_LAST or due == candidates
    if count > 1 and left > max(MET_LAST, opens / count):
        assert count - 1 not in due
