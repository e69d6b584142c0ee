"""TensorBoard and Weights & Biases get what rounds.jsonl gets; what they cannot do does not stop training."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from peer.errors import RunError, UserError
from peer.telemetry import trackers
from peer.telemetry.metrics import Metrics
from peer.telemetry.report import Reporter
from peer.telemetry.trackers import Trackers
from tests.unit.telemetry.test_report import round_report


def test_tensorboard_has_the_rounds_and_evaluations(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    started = trackers.start(["tensorboard"], tmp_path, run="demo", peer="a", peer_id="QmA")
    reporter = Reporter(tmp_path, Metrics(), started)
    for number in (1, 2):
        reporter.round(round_report(number))
    reporter.evaluation(20, 1280, 2.5)
    started.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(it.step, it.value) for it in events.Scalars("train/loss")] == [(10, 3.0), (20, 3.0)]
    assert [(it.step, it.value) for it in events.Scalars("val/loss")] == [(20, 2.5)]
    assert [it.value for it in events.Scalars("tokens")] == [640.0, 1280.0, 1280.0]
    assert events.Scalars("seconds/match")[0].value == 1.0


def test_one_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r'wandb is not installed; pip install "noloco-peer\[wandb\]"'):
        trackers.start(["wandb"], tmp_path, run="demo", peer="a", peer_id="QmA")


def test_one_whose_service_is_away_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under systemd an outage of W&B at a restart was the end of the peer: exit code 2."""

    def init(**_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "wandb", wandb := Wandb())
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(RunError, match=r"wandb does not start: no network; start again, or leave it out"):
        trackers.start(["wandb"], tmp_path, run="demo", peer="a", peer_id="QmA")


class Error(Exception):
    """Of ``wandb.errors``, as the next ones."""


class CommError(Error): ...


class AuthenticationError(CommError): ...


class UsageError(Error): ...


class UnsupportedError(UsageError): ...


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (UsageError("No API key configured.\nUse `wandb login`"), UserError, "correct this"),
        (UnsupportedError("needs a newer server"), UserError, "correct this"),
        (AuthenticationError("WANDB_API_KEY invalid: it has 3 characters"), UserError, "correct this"),
        (CommError("the server did not answer within 90 s"), RunError, "start again"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_not_tried_again(
    error: Error, kind: type[Exception], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service began again for ever, and ``swarm`` four times for each member."""
    monkeypatch.setitem(sys.modules, "wandb", wandb := Wandb())
    monkeypatch.setattr(wandb, "init", Mock(side_effect=error))
    with pytest.raises(kind, match=f"wandb does not start: .*; {advice}, or leave it out") as raised:
        trackers.start(["wandb"], tmp_path, run="demo", peer="a", peer_id="QmA")
    assert "\n" not in str(raised.value)


class Wandb:
    """Of the module ``wandb`` and its run what is used, as its documentation describes it."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}
        self.ended = False
        self._step = 0

    def init(self, **_: object) -> Wandb:
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        """Values of a step below the last one are dropped with a warning."""
        if step is None or step >= self._step:
            self.drawn.append(data)
            self._step = self._step + 1 if step is None else step

    def finish(self) -> None:
        self.ended = True


def test_steps_that_come_again_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, or in a run that began anew, W&B dropped them until the old last step was passed."""
    monkeypatch.setitem(sys.modules, "wandb", wandb := Wandb())
    for steps in ((10, 20, 30), (20, 30), (0, 10)):  # a start each
        started = trackers.start(["wandb"], tmp_path, run="demo", peer="a", peer_id="QmA")
        for step in steps:
            started.log(step, {"train/loss": 3.0})
    assert [it["step"] for it in wandb.drawn] == [10, 20, 30, 20, 30, 0, 10]
    assert all(it["train/loss"] == 3.0 for it in wandb.drawn)
    assert wandb.axes["*"] == "step"


def test_a_run_that_the_program_has_begun_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It got a peer's values and x-axis, and ended with the peer."""
    programs, ours = Wandb(), Wandb()

    def init(reinit: str = "default", **_: object) -> Wandb:
        """While a run is active, as its documentation describes it."""
        return ours if reinit == "create_new" else programs

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    started = trackers.start(["wandb"], tmp_path, run="demo", peer="a", peer_id="QmA")
    started.log(10, {"train/loss": 3.0})
    started.close()
    assert (programs.drawn, programs.axes, programs.ended) == ([], {}, False)
    assert (ours.drawn, ours.ended) == ([{"train/loss": 3.0, "step": 10}], True)


class Broken:
    """Fails at its second value."""

    def __init__(self) -> None:
        self.got: list[Mapping[str, float]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.got.append(values)
        if len(self.got) == 2:
            raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("still none")


def test_one_that_never_closes_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without its service W&B tries again for ever; the last push waits behind it."""
    stuck, waits = Broken(), threading.Event()
    monkeypatch.setattr(stuck, "close", waits.wait)
    monkeypatch.setattr(trackers, "TRACKER_SECONDS", 0.1)
    Trackers([stuck]).close()
    waits.set()
    assert "Broken did not close: no answer" in caplog.text


def test_one_that_breaks_is_left_out_and_values_that_are_none_too() -> None:
    broken, other = Broken(), Broken()
    all_of_them = Trackers([broken])
    for step in range(4):
        all_of_them.log(step, {"a": 1.0, "b": None, "c": math.nan})
    assert broken.got == [{"a": 1.0}] * 2
    Trackers([other]).close()  # says so, and no more
