"""The callback of a Hugging Face ``Trainer``: the loss of a step, and when it leaves."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from peer.api.huggingface import OuterLoopCallback, StepLosses, _shuffle_for
from peer.api.loop import OuterLoop

NOTHING: Any = None


class Member:
    """A callback with a peer that notes what it is told."""

    def __init__(self) -> None:
        self.callback, self.outer = OuterLoopCallback(run="a", tokens=1), Mock(done=False, swarm_step=0)
        self.callback.outer = self.outer
        self.control = TrainerControl()

    def step(self, number: int) -> Any:
        """The loss that it is told."""
        self.callback.on_step_end(NOTHING, TrainerState(global_step=number, max_steps=9), self.control)
        return self.outer.step.call_args[1]["loss"]


def test_a_trainer_that_loads_its_best_weights_at_its_end_has_left_before() -> None:
    """The rest of the running swap was mixed into them."""
    member = Member()
    member.callback.on_log(NOTHING, NOTHING, NOTHING, logs={"loss": 1.5})
    member.callback.on_log(NOTHING, NOTHING, NOTHING, logs={"train_loss": 1.4})  # a program's own line
    assert member.step(1) == 1.5 and member.step(2) is None and not member.outer.close.called
    member.callback.on_log(NOTHING, NOTHING, NOTHING, logs={"train_loss": 1.2, "total_flos": 3.0})  # then it loads them
    member.outer.close.assert_called_once_with(None)


@pytest.mark.parametrize(("step", "stops", "left"), [(8, False, False), (9, False, True), (8, True, True)])
def test_it_has_left_when_an_epoch_ends_and_no_step_follows(step: int, stops: bool, left: bool) -> None:
    """Some versions of the trainer log their last line after they have loaded the best weights."""
    member = Member()
    member.control.should_training_stop = stops
    member.callback.on_epoch_end(NOTHING, TrainerState(global_step=step, max_steps=9), member.control)
    assert member.outer.close.called is left


def forward(hook: StepLosses, model: nn.Module, value: float, *, gradient: bool = True, **keywords: Any) -> None:
    output = CausalLMOutput(loss=torch.tensor(value, requires_grad=gradient))  # type: ignore[arg-type]
    hook(model, (), keywords, output)


@pytest.mark.parametrize(("keywords", "loss"), [({"num_items_in_batch": 7}, 6.0), ({}, 3.0)])
def test_the_loss_of_a_step_is_that_of_its_batches(keywords: dict[str, Any], loss: float) -> None:
    """The trainer says it every ``logging_steps`` only, so that no merge was ever judged."""
    member, model = Member(), nn.Linear(1, 1)
    hook = member.callback._losses
    hook.active = True
    forward(hook, model, 2.0, **keywords)
    forward(hook, model, 4.0, **keywords)
    forward(hook, model, 50.0, gradient=False, **keywords)
    forward(hook, model.eval(), 60.0, **keywords)
    assert member.step(1) == loss
    hook(model.train(), (), keywords, (torch.ones(1),))
    assert member.step(2) is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_newcomers_learning_rate_is_that_of_the_swarms_step(wrapped: bool) -> None:
    """It trained by its own schedule: at the swarm's end 3,000 times the others' rate."""
    member, optimizer = Member(), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    parts: Any = {"lr_scheduler": SimpleNamespace(scheduler=schedule) if wrapped else schedule}
    for step in (80, 81, 83):
        member.outer.swarm_step = step
        member.callback.on_step_end(NOTHING, TrainerState(global_step=1, max_steps=100), member.control, **parts)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - step / 100)
    member.outer.swarm_step = 10
    member.callback.on_step_end(NOTHING, TrainerState(global_step=2, max_steps=100), member.control, **parts)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("kind", ["LambdaLR", "ExponentialLR", "SequentialLR"])
def test_a_member_that_goes_back_some_steps_has_their_learning_rate(kind: str, tensor: bool) -> None:
    """After a split it took its group's lower step, kept the later rate, and ended with the rate 0. A rate that is a
    tensor, which schedules change in place, was wrong the second time.
    """

    def made() -> tuple[torch.optim.SGD, Any]:
        schedules, rate = torch.optim.lr_scheduler, torch.tensor(1.0) if tensor else 1.0
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate)
        if kind == "LambdaLR":
            return optimizer, schedules.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 100))
        decay = schedules.ExponentialLR(optimizer, 0.9)
        if kind == "ExponentialLR":
            return optimizer, decay
        return optimizer, schedules.SequentialLR(optimizer, [decay, schedules.StepLR(optimizer, 5)], [7])

    def rates(member: Member, steps: list[int]) -> list[float]:
        optimizer, schedule = made()
        found, rate = [], optimizer.param_groups[0]["lr"]
        for step in steps:
            member.outer.swarm_step = step
            member.callback._follow(schedule)
            found.append(float(optimizer.param_groups[0]["lr"]))
        assert not tensor or optimizer.param_groups[0]["lr"] is rate  # a compiled step reads this one
        return found

    assert rates(Member(), [90, 30, 31, 4])[1:] == [rates(Member(), [step])[0] for step in (30, 31, 4)]


def falling(resumed: int) -> tuple[Member, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A schedule of 200 steps, of which so many were made before."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 200)
    optimizer.step()
    for _ in range(resumed):
        schedule.step()
    return Member(), optimizer, schedule


def test_a_trainer_that_has_resumed_further_than_the_swarm_keeps_its_rate() -> None:
    member, optimizer, schedule = falling(resumed=40)
    for step in (10, 60, 50, 30):
        member.outer.swarm_step = step
        member.callback._follow(schedule)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - {10: 40, 30: 50}.get(step, step) / 200)


def test_a_trainer_that_stays_ahead_of_the_swarm_goes_on_with_its_schedule() -> None:
    """It began anew at the step from which it had resumed, once the swarm came there."""
    member, optimizer, schedule = falling(resumed=40)
    for step in range(60):
        schedule.step()
        member.outer.swarm_step = step
        member.callback._follow(schedule)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - (41 + step) / 200)


def test_a_schedule_that_cannot_follow_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    schedules, member = torch.optim.lr_scheduler, Member()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    member.outer.swarm_step = 20
    others = (
        schedules.ReduceLROnPlateau(optimizer),
        schedules.ChainedScheduler([schedules.StepLR(optimizer, 5)]),
        SimpleNamespace(last_epoch=0, step=lambda metrics: None),  # as transformers' GreedyLR
    )
    for schedule in (*others, None):
        member.callback._follow(schedule)
    assert "schedule" not in caplog.text and optimizer.param_groups[0]["lr"] == 1.0
    for _ in range(2):
        member.callback._follow(schedules.OneCycleLR(optimizer, 1.0, total_steps=10))
    assert caplog.text.count("the learning rate is 0 at the swarm's step 20: the schedule needs the run's steps") == 1
    other = Member()
    other.outer.swarm_step = 20
    other.callback._follow(schedules.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10)))
    assert caplog.text.count("the learning rate is 0") == 2


def test_a_model_with_the_hook_can_be_copied_and_pickled() -> None:
    """Averages of weights are copies of the model; the hook held the peer with its threads and locks."""
    member, model = Member(), nn.Linear(1, 1)
    hook = member.callback._losses
    hook.active = True
    model.register_forward_hook(hook, with_kwargs=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (other,) = copied._forward_hooks.values()
        forward(other, copied, 2.0)
        assert other is not hook and other.take() is None


def test_half_a_file_of_a_checkpoint_is_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    member = Member()
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "outer.pt").write_bytes(b"PK")
    arguments, state = SimpleNamespace(output_dir=tmp_path, resume_from_checkpoint=None), TrainerState(global_step=3)
    assert member.callback._saved(arguments, state, str(tmp_path)) is None  # type: ignore[arg-type]
    assert "cannot be read" in caplog.text and "starts as a newcomer" in caplog.text
    member.outer.state_dict.return_value = {"round": 1}
    member.callback._training = "a"
    member.callback.on_save(arguments, TrainerState(global_step=3, max_steps=9), member.control)  # type: ignore[arg-type]
    assert member.callback._saved(arguments, state, str(tmp_path)) == {"round": 1}  # type: ignore[arg-type]
    assert [it.name for it in folder.iterdir()] == ["outer.pt"]


class Reads(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(())), list[int]()

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += number.tolist()
        return {"loss": self.weight * number.float().mean()}


def read_by(peer_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[int]:
    """The order in which a trainer with this peer reads the numbers to 64."""
    monkeypatch.setattr(OuterLoop, "start", Mock(return_value=Mock(done=False, swarm_step=0, peer_id=peer_id)))
    data: Any = [{"number": number} for number in range(64)]
    model = Reads()
    given = {"output_dir": str(folder), "use_cpu": True, "num_train_epochs": 1, "report_to": [], **arguments}
    training = TrainingArguments(save_strategy="no", disable_tqdm=True, **given)
    Trainer(model, training, train_dataset=data, callbacks=[OuterLoopCallback(run="a")]).train()
    return model.seen


def test_each_peer_reads_the_data_in_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the trainer's default arguments all read the same batches, and N peers did the work of one."""
    one, again, other = (read_by(peer_id, tmp_path, monkeypatch) for peer_id in ("Qm1", "Qm1", "Qm2"))
    assert sorted(one) == sorted(other) == list(range(64))
    assert one == again != other
    theirs = [read_by(peer_id, tmp_path, monkeypatch, data_seed=7) for peer_id in ("Qm1", "Qm2")]
    assert theirs[0] == theirs[1] and "same order" not in caplog.text  # that is what its user asked for
    _shuffle_for("Qm1", None)  # an IterableDataset, or a sampler without a seed
    assert "read the same batches in the same order" in caplog.text


class Notebook:
    """Cells that each train with a trainer of their own; notes when their peers start and leave."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted, self._folder = list[str](), folder
        monkeypatch.setattr(OuterLoop, "start", self._start)

    def train(self, run: str, model: Reads) -> None:
        data: Any = [{"number": number} for number in range(8)]
        given = {"use_cpu": True, "num_train_epochs": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        training = TrainingArguments(output_dir=str(self._folder), **given)
        Trainer(model, training, train_dataset=data, callbacks=[OuterLoopCallback(run=run)]).train()

    def _start(self, model: nn.Module, *, run: str, **_: Any) -> Any:
        outer = Mock(done=False, swarm_step=0, peer_id="Qm1")
        outer.close.side_effect = lambda _: self.noted.append(f"{run} leaves")
        self.noted.append(f"{run} starts")
        return outer


class RunsOutOfMemory(Reads):
    """In its first forward pass."""

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError


def test_a_training_that_an_exception_has_ended_has_left_before_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer stayed in the swarm for as long as the notebook, and kept its folder and its memory."""
    notebook = Notebook(tmp_path, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        notebook.train("one", RunsOutOfMemory())
    other = threading.Thread(target=notebook.train, args=("other", Reads()))  # it may train beside the first one
    other.start()
    other.join()
    assert "other leaves" in notebook.noted and "one leaves" not in notebook.noted
    notebook.noted.clear()
    notebook.train("two", Reads())
    assert notebook.noted[:3] == ["one leaves", "two starts", "two leaves"]
    assert "one leaves" not in notebook.noted[3:]


def test_a_training_that_went_on_in_another_thread_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One callback, first in this thread, where an exception ended it, then in another one."""
    loops = [Mock(done=False, swarm_step=0, peer_id="Qm1") for _ in range(3)]
    monkeypatch.setattr(OuterLoop, "start", Mock(side_effect=loops))
    member, given = OuterLoopCallback(run="a"), TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])

    def begin(callback: OuterLoopCallback) -> None:
        callback.on_train_begin(given, TrainerState(), TrainerControl(), model=nn.Linear(1, 1), optimizer=None)

    begin(member)
    other = threading.Thread(target=begin, args=(member,))
    other.start()
    other.join()
    begin(OuterLoopCallback(run="b"))
    assert loops[0].close.called and not loops[1].close.called


def test_a_run_that_was_over_before_is_given_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = Mock(done=True, swarm_step=100, peer_id="Qm1")
    monkeypatch.setattr(OuterLoop, "start", Mock(return_value=outer))
    given: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    training = TrainingArguments(output_dir=str(tmp_path), **given)
    data: Any = [{"number": number} for number in range(64)]
    trainer = Trainer(Reads(), training, train_dataset=data, callbacks=[OuterLoopCallback(run="a")])
    trainer.train()
    assert trainer.state.global_step == 1 and not outer.step.called


class Newcomer:
    """A trainer of 100 steps whose swarm has made 80 of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
        outer = Mock(done=False, swarm_step=80, peer_id="Qm1")
        outer.step.side_effect = self._step
        outer.state_dict.return_value = {"round": 1}
        monkeypatch.setattr(OuterLoop, "start", Mock(return_value=outer))
        data: Any = [{"number": number} for number in range(64)]
        given = {"save_steps": 7, "eval_steps": 7, "max_steps": 100, "report_to": [], **arguments}
        training = TrainingArguments(output_dir=str(folder), use_cpu=True, disable_tqdm=True, **given)
        self.outer, self.folder, self.evaluated = outer, folder, list[int]()
        callbacks: Any = [OuterLoopCallback(run="a"), Watch(self.evaluated)]
        Trainer(Reads(), training, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks).train()

    def _step(self, **_: Any) -> None:
        self.outer.swarm_step += 1
        self.outer.done = self.outer.swarm_step >= 100

    def saved(self) -> list[int]:
        return sorted(int(it.parent.name.removeprefix("checkpoint-")) for it in self.folder.glob("*/outer.pt"))


class Watch(TrainerCallback):
    """Notes the steps at which a trainer evaluates."""

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        self._steps.append(state.global_step)


@pytest.mark.parametrize(
    ("when", "evaluated", "saved"),
    [
        ({"eval_strategy": "steps"}, [7, 14, 20], [7, 14, 20]),
        ({"eval_strategy": "steps", "save_steps": 50, "eval_steps": 50}, [20], [20]),
        ({"eval_strategy": "steps", "save_steps": 10, "eval_steps": 10}, [10, 20], [10, 20]),  # not twice
        ({"eval_strategy": "steps", "eval_delay": 30}, [], [7, 14, 20]),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, [8, 16, 20], [8, 16, 20]),
        ({"save_strategy": "no"}, [], []),
    ],
)
def test_a_newcomer_ends_with_its_last_checkpoint_and_evaluation(
    when: dict[str, Any], evaluated: list[int], saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer asks for both at its own last step, which a newcomer never makes: it left nothing at all."""
    newcomer = Newcomer(tmp_path, monkeypatch, **when)
    assert newcomer.outer.step.call_count == 20
    assert (newcomer.evaluated, newcomer.saved()) == (evaluated, saved)
