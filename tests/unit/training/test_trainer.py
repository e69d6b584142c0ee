"""What the trainer does with the report of an inner phase, and with a checkpoint that is not written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor

from peer import clock
from peer.config.schema import Config, RunConfig
from peer.errors import RunError, UserError
from peer.p2p.event_loop import NoAnswer
from peer.process import LoopContext
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.training.checkpoint import Checkpoints
from peer.training.saving import Saver
from peer.training.trainer import Trainer
from tests.unit import parts


def trainer_of(state: Any, *, steps: int = 40, saver: Any = None, validation: Any = None) -> Any:
    """A trainer whose member has a network that never fails."""
    member = MagicMock()
    member.resources.context, member.presence.failure = LoopContext(), ""
    member.join_late.return_value = False
    return Trainer(Config(run=RunConfig(steps=steps)), member, state, saver or Mock(), validation or Mock())


def account(poison: float, *, at: int, steps: int) -> None:
    """Train for some steps, and give the report to a trainer. ``poison`` is added to the gradients of step ``at``."""
    state, seen = parts.peer_state(), 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        return gradient + poison if seen == at else gradient

    next(state.inner.model.parameters()).register_hook(hook)
    trainer_of(state).account(state.inner.run(state.stream.take(steps)))


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_broken_weights_end_the_run_before_anybody_gets_them(poison: float) -> None:
    """The loss of the last step was computed before its gradients broke the weights."""
    with pytest.raises(RunError, match=r"^the norm of the gradients is (nan|inf) at step 3; look at the data"):
        account(poison, at=3, steps=3)
    with pytest.raises(RunError, match=r"^the training loss is nan at step 3; look at the data"):
        account(poison, at=2, steps=3)
    account(0.0, at=3, steps=3)


@pytest.mark.parametrize("failure", [RunError("the hub does not answer"), UserError("row 301 has no text")])
def test_the_steps_before_the_data_failed_are_counted_and_saved(failure: RunError | UserError) -> None:
    """They were lost."""

    def stream() -> Iterator[Tensor]:
        yield from state.stream.take(3)
        raise failure

    state = parts.peer_state()
    trainer = trainer_of(state)
    trainer.stream = Mock(take=lambda _: stream())
    with pytest.raises(type(failure), match=str(failure)):
        trainer.loop()
    assert state.inner.step == state.counters.phase_steps_done == 3
    assert trainer.saver.save.call_count == 1 and not trainer.boundary.cross.called


def test_the_steps_before_the_network_hung_are_counted() -> None:
    """A resumed peer made them again, beyond the end of its run, and its next contribution weighed too little."""
    state = parts.peer_state()
    trainer = trainer_of(state)
    trainer.phase_length.begin.return_value = 5
    hangs = [None, None, NoAnswer("the network thread gave no answer within 5 s")]
    trainer.boundary.between_steps.side_effect = hangs
    with pytest.raises(NoAnswer):
        trainer.loop()
    assert state.inner.step == state.counters.phase_steps_done == 2
    assert state.counters.tokens == state.counters.phase_tokens > 0


@pytest.mark.parametrize("away", [False, True])
def test_a_phase_whose_time_is_up_ends_unless_its_peer_is_asked_to_stop(away: bool) -> None:
    """A resumed peer makes the rest of it."""
    state = parts.peer_state()
    trainer = trainer_of(state)
    trainer.context.progress.begin(1, 1, limit=0.0)
    trainer.context.stop.requested = away
    trainer.account(state.inner.run(state.stream.take(1)))
    assert trainer.boundary.cut.called != away


@pytest.mark.parametrize(("replaced", "round", "saves"), [(True, 1, True), (False, 1, False), (False, 10, True)])
def test_after_a_round_it_saves_what_was_replaced_and_every_tenth(replaced: bool, round: int, saves: bool) -> None:
    trainer = trainer_of(parts.peer_state(), validation=Mock(losses=lambda: (1.0, {})))
    trainer.member.join_late.return_value, trainer.counters.round = replaced, round
    trainer.now_and_then()
    assert trainer.saver.begin.called == saves


def test_a_failed_run_waits_for_its_checkpoint_and_not_for_the_accelerator(tmp_path: Path) -> None:
    """After the loss of a rank the accelerator's work never ends, and the peer hung before it had left."""
    state, waits = parts.peer_state(), list[str]()
    timer = ActivityTimer(Metrics(), lambda: waits.append("for the accelerator"))
    saver = Saver(Checkpoints(tmp_path, 2), state, MagicMock(), timer)
    trainer = trainer_of(state, saver=saver, validation=Mock(losses=lambda: (1.0, {})))

    def lost(*_: object) -> None:
        saver.begin()
        waits.clear()
        raise RunError("rank 1 of this peer has ended")

    trainer.inner = Mock(run=lost, step=0)
    with pytest.raises(RunError, match="rank 1 of this peer"):
        trainer.run()
    assert waits == [] and len(saver.checkpoints.all()) == 1


class FullDisk:
    """A trainer that has made all steps, in a folder that cannot be written until ``room`` is made."""

    def __init__(self, folder: Path) -> None:
        self.folder, reporter = folder, MagicMock()
        folder.touch()  # a file
        state = parts.peer_state()
        state.inner.step = 4
        saver = Saver(Checkpoints(folder / "checkpoints", 2), state, reporter, MagicMock())
        validation = Mock(losses=lambda: (1.0, {}))
        self.trainer = trainer_of(state, steps=4, saver=saver, validation=validation)
        self.member, self.context = self.trainer.member, self.trainer.context
        self.member.reporter, self.member.resources.folder.path = reporter, folder

    def room(self) -> None:
        self.folder.unlink()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_last_checkpoint_that_is_not_written_ends_the_run_with_an_error(tmp_path: Path, stopped: bool) -> None:
    """The run ended with success, and all steps since the last good checkpoint were lost."""
    peer = FullDisk(tmp_path / "a")
    peer.context.stop.requested = stopped
    with pytest.raises(RunError, match=f"^step 4: the state is not saved in {tmp_path}/a; free some space there") as it:
        peer.trainer.run()
    assert "\n" not in str(it.value)
    assert peer.member.reporter.evaluation.call_count == (0 if stopped else 2)


def test_the_last_checkpoint_is_tried_once_more_at_the_end(tmp_path: Path) -> None:
    """It was tried once."""
    peer = FullDisk(tmp_path / "a")
    evaluations = iter((lambda: None, peer.room))
    peer.member.reporter.evaluation.side_effect = lambda *them: next(evaluations)()
    peer.trainer.run()
    assert [path.name for path in peer.trainer.saver.checkpoints.all()] == ["step_00000004"]


def test_a_network_that_fails_on_a_full_disk_does_not_say_that_the_state_is_saved(tmp_path: Path) -> None:
    """It said so whatever the save gave."""
    peer = FullDisk(tmp_path / "a")
    peer.member.presence.failure = "p2pd has ended"
    report = Mock(tokens=0, steps=0, broken="")
    with pytest.raises(RunError, match=r"^p2pd has ended; the state is not saved in .*/a; free some space"):
        peer.trainer.account(report)
    peer.room()
    with pytest.raises(RunError, match=r"^p2pd has ended; the state is saved, start again"):
        peer.trainer.account(report)


def test_only_a_checkpoint_between_two_rounds_says_that_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one said it too."""
    peer = FullDisk(tmp_path / "a")
    caplog.set_level(logging.WARNING)
    logging.getLogger("noloco").addHandler(caplog.handler)
    try:
        with pytest.raises(RunError):
            peer.trainer.run()
        assert "checkpoint of step 4 not saved" in caplog.text and "continues" not in caplog.text
        peer.trainer.inner.step = 3
        peer.trainer.now_and_then()
        saving = peer.trainer.saver._saving
        assert saving is not None
        clock.result(saving.published, 60.0)
        peer.trainer.now_and_then()
    finally:
        logging.getLogger("noloco").removeHandler(caplog.handler)
    assert "training continues without this checkpoint" in caplog.text


@pytest.mark.parametrize("where", ["cross", "finish"])
def test_when_the_network_hangs_what_was_trained_is_saved(tmp_path: Path, where: str) -> None:
    """All since the last checkpoint was lost, ten rounds by default."""
    peer = FullDisk(tmp_path / "a")
    peer.room()
    hangs = Mock(side_effect=NoAnswer("the network thread gave no answer within 5 s"))
    peer.trainer.boundary = Mock(**{where: hangs})
    peer.trainer.loop = (lambda: hangs()) if where == "cross" else lambda: None
    with pytest.raises(
        RunError, match=r"^the network thread gave no answer within 5 s; the state is saved, start again"
    ):
        peer.trainer.run()
    assert [path.name for path in peer.trainer.saver.checkpoints.all()] == ["step_00000004"]


def test_training_goes_on_while_a_checkpoint_gets_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator waited for it: half a minute for ten gigabytes on some disks."""
    peer, there = FullDisk(tmp_path / "a"), threading.Event()
    peer.room()
    monkeypatch.setattr("peer.training.checkpoint.sync", lambda path: there.wait(60.0))
    peer.trainer.inner.step = 3
    peer.trainer.now_and_then()
    assert not peer.trainer.saver.checkpoints.all() and not peer.member.reporter.saved.called
    there.set()
    peer.trainer.inner.step = 4
    peer.trainer.run()  # it waits for the one before, and saves again
    assert [path.name for path in peer.trainer.saver.checkpoints.all()] == ["step_00000003", "step_00000004"]
    assert peer.member.reporter.saved.call_count == 2


def test_what_changes_after_the_write_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    checkpoints, weights, state = Checkpoints(tmp_path, 1), torch.zeros(4), {"position": [1]}
    written = checkpoints.write(1, state, {"model": {"w": weights}}.items())
    weights += 1
    state["position"].append(2)
    assert checkpoints.publish(written)
    saved = checkpoints.newest()
    assert saved is not None and saved.state["position"] == [1] and not saved.tensors["model"]["w"].any()


def saving_on_a_slow_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FullDisk, threading.Event]:
    """A peer at step 5 whose save of step 4 has not ended; the disk goes on with the event."""
    peer, there = FullDisk(folder / "a"), threading.Event()
    peer.room()
    monkeypatch.setattr("peer.training.checkpoint.sync", lambda path: there.wait(60.0))
    monkeypatch.setattr("peer.training.saving.DISK_SECONDS", 0.05)
    assert not peer.trainer.saver.save()
    peer.trainer.inner.step = 5
    return peer, there


def test_nothing_is_written_while_a_slow_disk_still_writes_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removed the other's files, and neither was saved."""
    peer, there = saving_on_a_slow_disk(tmp_path, monkeypatch)
    peer.trainer.saver.begin()
    there.set()
    monkeypatch.setattr("peer.training.saving.DISK_SECONDS", 60.0)
    assert peer.trainer.saver.end()
    assert [path.name for path in peer.trainer.saver.checkpoints.all()] == ["step_00000004"]
    assert peer.trainer.saver.save()
    assert [path.name for path in peer.trainer.saver.checkpoints.all()] == ["step_00000004", "step_00000005"]


def test_a_save_is_of_this_step_and_not_of_an_earlier_one_that_a_slow_disk_had_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hung for 20 minutes at the end: the peer ended with success, without the steps since the last one."""
    peer, there = saving_on_a_slow_disk(tmp_path, monkeypatch)

    def recovers(*them: object) -> None:
        there.set()
        monkeypatch.setattr("peer.training.saving.DISK_SECONDS", 60.0)

    monkeypatch.setattr("peer.training.saving.log.error", recovers)
    assert not peer.trainer.saver.save()
    assert [path.name for path in peer.trainer.saver.checkpoints.all()] == ["step_00000004"]
    assert peer.trainer.saver.save()
