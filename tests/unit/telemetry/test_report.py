"""What a peer writes down. The plain cases are in test_run_folder.py; here files, series and readers agree."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from peer import clock, process
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome, Reason
from peer.swarm.directory.records import Report
from peer.telemetry.metrics import Metrics
from peer.telemetry.report import BoundaryReport, Reporter, RoundReport
from peer.telemetry.series import ACTIVITIES

KEYS = {
    *("round", "step", "tokens", "train_loss", "partner", "outcome", "seconds"),
    *("bytes_sent", "bytes_received", "staleness"),
}


def test_a_loss_that_no_record_can_have_is_left_out(tmp_path: Path) -> None:
    """Otherwise no member would accept the record of a peer whose own loop has a larger one."""
    reporter = Reporter(tmp_path, Metrics())
    for loss in (math.nan, math.inf, -math.inf, 1e39, -1e39):
        reporter.inner(inner_report(loss))
        reporter.evaluation(1, 1, loss)
        report = reporter.status(dict.fromkeys(ACTIVITIES, 0.0), 1)
        assert (report.train_loss, report.val_loss) == (None, None)
        assert Report.model_validate_json(report.model_dump_json()) == report
    reporter.inner(inner_report(3.00001))
    assert reporter.status(dict.fromkeys(ACTIVITIES, 0.0), 1).train_loss == 3.0


def test_its_time_begins_when_it_has_joined(tmp_path: Path) -> None:
    """A newcomer that loads and downloads for 20 minutes seemed to have merged with nobody for as long."""
    none = dict.fromkeys(ACTIVITIES, 0.0)
    spent = {**none, "join": 1200.1, "paused": 3600.0, "inner": 8.0, "match": 1.0, "apply": 1.0}
    said = Reporter(tmp_path, Metrics()).status(spent, 3)
    assert (said.seconds, said.idle_seconds) == (10.0, 1.0)


def inner_report(loss: float = 3.0, steps: int = 10) -> InnerReport:
    return InnerReport(steps, 64 * steps, loss, loss, grad_norm=1.5, learning_rate=1e-3, seconds=2.0, losses=steps)


def round_report(
    number: int, outcome: Outcome = Outcome.MERGED, inner: InnerReport | None = None, distance: float | None = 0.25
) -> RoundReport:
    partners = () if outcome is Outcome.ALONE else ("b",)
    averaged = Averaged(torch.zeros(1), outcome, partners, 100, 90, 0.5, distance, detail="why\nin two lines")
    seconds = {**dict.fromkeys(ACTIVITIES, 0.0), "inner": 9.0, "match": 1.0}
    boundary = BoundaryReport(number, 10 * number, 640 * number, inner or inner_report())
    return RoundReport(boundary, averaged, seconds, 0.1, 2)


def rows(folder: Path, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_one_line_with_the_promised_keys(tmp_path: Path, outcome: Outcome) -> None:
    Reporter(tmp_path, Metrics()).round(round_report(3, outcome))
    (row,) = rows(tmp_path)  # not closed: a line is out as soon as the round has ended
    assert row.keys() >= KEYS
    assert (row["round"], row["step"], row["tokens"], row["outcome"]) == (3, 30, 1920, outcome.value)
    assert row["partner"] == (None if outcome is Outcome.ALONE else "b")
    assert row["seconds"].keys() == set(ACTIVITIES)
    assert row["staleness"] == 0


def test_the_series_add_up_to_the_rows(tmp_path: Path) -> None:
    metrics = Metrics()
    reporter = Reporter(tmp_path, metrics)
    outcomes = [Outcome.MERGED, Outcome.ALONE, Outcome.TIMEOUT, Outcome.MERGED]
    for number, outcome in enumerate(outcomes, 1):
        reporter.inner(inner_report())
        reporter.round(round_report(number, outcome))
    reporter.evaluation(40, 2560, 2.5)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"noloco_{name}", labels)

    assert [value("rounds_total", outcome=name) for name in ("merged", "alone", "timeout", "corrupt")] == [2, 1, 1, 0]
    assert value("exchange_bytes_total", direction="sent") == sum(row["bytes_sent"] for row in rows(tmp_path)) == 400
    assert value("exchange_bytes_total", direction="received") == 360
    assert value("exchange_duration_seconds_count") == 3  # alone, there was no exchange
    assert (value("inner_steps_total"), value("tokens_total")) == (40, rows(tmp_path)[-1]["tokens"])
    assert (value("round"), value("swarm_members"), value("train_loss")) == (4, 2, 3.0)
    assert (value("val_loss"), value("pair_distance")) == (rows(tmp_path, "evals.jsonl")[0]["val_loss"], 0.25)


def test_an_empty_phase_does_not_overwrite_the_last_loss(tmp_path: Path) -> None:
    metrics = Metrics()
    reporter = Reporter(tmp_path, metrics)
    reporter.inner(inner_report(3.0))
    reporter.inner(inner_report(math.nan, steps=0))
    assert metrics.registry.get_sample_value("noloco_train_loss") == 3.0


def test_what_was_refused_is_counted_by_reason(tmp_path: Path) -> None:
    metrics = Metrics()
    reporter = Reporter(tmp_path, metrics)
    for number, reason in enumerate((Reason.FAR, Reason.FAR, None, Reason.REPLAYED), 1):
        outcome = Outcome.POISONED if reason else Outcome.MERGED
        report = round_report(number, outcome)
        reporter.round(replace(report, averaged=replace(report.averaged, reason=reason)))
    for reason, count in ((Reason.FAR, 2), (Reason.REPLAYED, 1), (Reason.HEADER, 0)):
        assert metrics.registry.get_sample_value("noloco_refusals_total", {"reason": reason}) == count
    assert json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])["reason"] == "far"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_still_json_for_every_reader(tmp_path: Path, bad: float) -> None:
    reporter = Reporter(tmp_path, Metrics())
    reporter.round(round_report(1, Outcome.POISONED, inner_report(bad), distance=bad))
    reporter.evaluation(10, 640, bad)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is Python's, not JSON's")

    for name in ("rounds.jsonl", "evals.jsonl"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)


def test_a_peer_that_goes_on_with_weights_that_are_less_far_has_one_line_of_rounds(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics())
    for number in (1, 2, 3, 4, 5):
        reporter.round(round_report(number))
        reporter.evaluation(10 * number, 640 * number, 2.5)
    for number in (3, 4):
        reporter.round(round_report(number, Outcome.TIMEOUT))
    assert [(row["round"], row["outcome"]) for row in rows(tmp_path)] == [
        *((1, "merged"), (2, "merged")),
        *((3, "timeout"), (4, "timeout")),
    ]
    assert [row["step"] for row in rows(tmp_path, "evals.jsonl")] == [10, 20, 30]
    assert reporter.reached == 4


def test_a_restart_goes_on_in_the_same_files(tmp_path: Path) -> None:
    for number in (1, 2):
        reporter = Reporter(tmp_path, Metrics())
        reporter.rewind(number - 1, 10 * (number - 1))
        reporter.round(round_report(number))
        reporter.evaluation(10 * number, 640 * number, 3.0)
    assert [row["round"] for row in rows(tmp_path)] == [1, 2]
    assert [row["step"] for row in rows(tmp_path, "evals.jsonl")] == [10, 20]


@pytest.mark.parametrize("cut", ['{"round": 3', '{"round": 3, "step": 30}', "\0\0\0\0", "{"])
def test_rewinding_leaves_whole_lines_only(tmp_path: Path, cut: str) -> None:
    reporter = Reporter(tmp_path, Metrics())
    for number in (1, 2, 3):
        reporter.round(round_report(number))
        reporter.evaluation(10 * number, 640, 3.0)
    for name in ("rounds.jsonl", "evals.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write(cut)
    reporter = Reporter(tmp_path, Metrics())
    reporter.rewind(2, 20)
    reporter.round(round_report(3))
    reporter.evaluation(30, 640, 2.0)
    assert [row["round"] for row in rows(tmp_path)] == [1, 2, 3]
    assert [row["val_loss"] for row in rows(tmp_path, "evals.jsonl")] == [3.0, 3.0, 2.0]


def test_a_peer_that_comes_back_knows_how_far_it_was(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics())
    assert reporter.reached == 0
    for number in (1, 2, 3):
        reporter.round(round_report(number))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "st')  # killed
    again = Reporter(tmp_path, Metrics())
    assert again.reached == 3
    again.rewind(1, 10)
    assert again.reached == 1


@pytest.mark.usefixtures("virtual")
def test_in_a_pause_the_time_since_the_last_merge_and_checkpoint_stands_still(tmp_path: Path) -> None:
    """The gauges stood until its end, and a peer that came back to its swarm seemed to have saved nothing all night."""
    metrics, pause = Metrics(), process.Pause()
    reporter = Reporter(tmp_path, metrics, pause=pause)

    def since_merge() -> float | None:
        return reporter.status(dict.fromkeys(ACTIVITIES, 0.0), 2).merged_ago

    def since(series: str) -> float:
        return clock.unix() - float(metrics.registry.get_sample_value(f"noloco_last_{series}_timestamp_seconds") or 0)

    with pause.rest():
        clock.sleep(5.0)
    assert since_merge() is None
    reporter.round(round_report(1))
    reporter.saved()
    clock.sleep(10.0)
    with pause.rest():
        clock.sleep(3600.0)
        assert since_merge() == since("merge") == since("checkpoint") == pytest.approx(10.0)
        clock.sleep(60.0)  # it takes the state of a member
    clock.sleep(1.0)
    assert since_merge() == pytest.approx(11.0)
    assert since("merge") == since("checkpoint") == pytest.approx(11.0)


@pytest.mark.usefixtures("virtual")
def test_while_the_machine_sleeps_the_time_since_the_last_merge_and_checkpoint_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record said 15 seconds and Prometheus 8 hours: the alerts fired for each machine that woke."""
    metrics, unix = Metrics(), clock.unix
    reporter = Reporter(tmp_path, metrics)
    reporter.round(round_report(1))
    reporter.saved()
    clock.sleep(10.0)
    monkeypatch.setattr(clock, "unix", lambda: unix() + 8 * 3600.0)
    clock.sleep(5.0)
    for series in ("merge", "checkpoint"):
        told = metrics.registry.get_sample_value(f"noloco_last_{series}_timestamp_seconds")
        assert told is not None and clock.unix() - told == pytest.approx(15.0)
    assert reporter.status(dict.fromkeys(ACTIVITIES, 0.0), 2).merged_ago == pytest.approx(15.0)


@pytest.mark.usefixtures("virtual")
def test_each_border_of_a_pause_is_one_moment_to_the_thread_that_reads(tmp_path: Path) -> None:
    """Between two assignments the whole pause was told as time since the last merge."""
    pause, told = process.Pause(), list[float | None]()
    reporter = Reporter(tmp_path, Metrics(), pause=pause)

    def look(frame: FrameType, event: str, _: Any) -> Any:
        """At each instruction of the pause."""
        if frame.f_code.co_filename != process.__file__:
            return None
        frame.f_trace_opcodes = True
        told.append(reporter.status(dict.fromkeys(ACTIVITIES, 0.0), 2).merged_ago)
        return look

    reporter.round(round_report(1))
    clock.sleep(10.0)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one that wants instructions when the trace begins
    sys.settrace(look)
    try:
        with pause.rest():
            clock.sleep(3600.0)
    finally:
        sys.settrace(None)
    assert len(told) > 20 and set(told) == {10.0}
