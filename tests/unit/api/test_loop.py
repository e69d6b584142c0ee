"""The loop itself, without a network."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import nn

import peer
from peer import logs
from peer.api.config import OwnConfig, OwnRun
from peer.api.huggingface import OuterLoopCallback
from peer.api.loop import OuterLoop
from peer.config.digest import canonical
from peer.config.methods import DecoupledConfig
from peer.errors import RunError, UserError
from peer.outer.decoupled import Decoupled
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext
from peer.rounds.contribution import SparseContribution
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.training.outer_state import Counters


def watched_loop(step: int = 5, total: int = 100) -> tuple[OuterLoop, Any]:
    """A loop as its constructor makes it, ``step`` of ``total`` steps in. What it would open or ask is watched."""
    watched = Mock()
    watched._stop.requested, watched._member.presence.failure = False, ""
    watched._state.inner.step, watched._state.counters = step, Counters()
    watched._state.outer.slow.spans = ()
    reporter = watched._member.reporter
    reporter.count, reporter.recent, reporter.last = 0, (), None
    watched._length.remaining.return_value = 5
    watched._member.phase_length, watched._member.make_boundary.return_value = watched._length, watched._boundary
    resources = Mock(timer=ActivityTimer(Metrics()), context=LoopContext())
    resources.folder.path = Path()
    parts: dict[str, Any] = {
        "open_resources": lambda *_: nullcontext(resources),
        "member_node": Mock(),
        "connect": Mock(),
        "OwnState": lambda *_, **__: watched._state,
        "Membership": lambda *_, **__: watched._member,
        "Stop": lambda: watched._stop,
        "StepAccount": lambda: watched._account,
        "atexit": Mock(),
    }
    config = OwnConfig(run=OwnRun(name="test", steps=total))
    with patch.multiple("peer.api.loop", **parts), patch.object(logs, "attached", lambda *_: nullcontext()):
        outer = OuterLoop(nn.Linear(1, 1), config, (), None)
    watched.reset_mock()
    watched.at_exit = partial(*parts["atexit"].register.call_args.args)
    return outer, watched


def test_a_loss_is_kept_as_it_was_when_it_was_told() -> None:
    """A program that sums its losses in one tensor told sixteen times the last one: its next batch undid a merge."""
    outer, watched = watched_loop()
    loss = torch.tensor(3.0, requires_grad=True)
    outer.step(7, loss)
    with torch.no_grad():
        loss.zero_()
    (tokens, kept), _ = watched._account.add.call_args
    assert (tokens, float(kept), float(watched._state.inner.loss)) == (7, 3.0, 3.0) and not kept.requires_grad


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_is_a_number(shape: tuple[int, ...]) -> None:
    """An accelerator's copy to the host has no dimensions and refused it; a CPU did not."""
    outer, watched = watched_loop()
    outer.step(7, torch.full(shape, 3.0, requires_grad=True))
    (_, kept), _ = watched._account.add.call_args
    assert kept.shape == watched._state.inner.loss.shape == () and float(kept) == 3.0


@pytest.mark.parametrize("key", ["loss", "tokens"])
@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), torch.ones(2, 3)])
def test_a_tensor_of_several_numbers_is_refused_in_the_step_that_gives_it(key: str, value: torch.Tensor) -> None:
    """H calls later it was a ValueError of ``float``."""
    outer, watched = watched_loop(step=5)
    with pytest.raises(UserError, match=rf"OuterLoop.step: {key} is a tensor of shape \[.*\]; give one number"):
        outer.step(**{key: value})
    assert watched._state.inner.step == 5 and not watched.mock_calls


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "3.0"}, "loss is a str"),
        ({"loss": np.ones(3)}, "loss is a ndarray"),
        ({"loss": {}}, "loss is a dict"),
        ({"loss": 1j}, "loss is a complex"),
        ({"tokens": None}, "tokens is a NoneType"),
        ({"tokens": []}, "tokens is a list"),
        ({"tokens": math.nan}, "tokens is nan"),
        ({"tokens": torch.tensor(math.inf)}, "tokens is inf"),
        ({"tokens": -3}, "tokens is -3"),
    ],
)
def test_what_is_no_number_is_refused_in_the_step_that_gives_it(given: dict[str, Any], said: str) -> None:
    """It was a ValueError at the boundary, and at each one after it."""
    outer, watched = watched_loop(step=5)
    with pytest.raises(UserError, match=f"OuterLoop.step: {said}"):
        outer.step(**given)
    assert watched._state.inner.step == 5 and not watched.mock_calls
    outer.step(np.int64(7), np.float32(3.0))
    assert watched._state.inner.step == 6


def test_what_a_step_takes_and_gives_has_a_public_type() -> None:
    """Type checkers refused a tensor of tokens, which the text allows, and ``Round`` had no public name."""
    hints = get_type_hints(OuterLoop.step)
    assert hints["tokens"] == int | torch.Tensor and hints["return"] == peer.Round | None
    assert all(getattr(peer, name) for name in peer.__all__)


@pytest.mark.parametrize("step", [99, 98])
def test_after_the_last_step_no_phase_begins(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer waited a quarter of a phase more for partners, and its record said that it trains."""
    monkeypatch.setattr("peer.api.loop.require_finite", lambda *_: None)
    monkeypatch.setattr("peer.api.loop.require_same", lambda *_: None)
    outer, watched = watched_loop(step)
    watched._length.remaining.return_value = 0
    monkeypatch.setattr(OuterLoop, "close", lambda self: watched.close())
    outer.step(7)
    called = [call[0] for call in watched.mock_calls]
    assert ("_length.begin" in called) == ("_member.join_late" in called) == (step == 98)
    assert ("close" in called) == (step == 99)


def test_a_program_that_goes_on_after_the_last_step_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It trained on alone, and nothing said so."""
    outer, watched = watched_loop(step=99)
    watched._stop.request.side_effect = lambda: setattr(watched._stop, "requested", True)
    outer._process = os.getpid()
    outer.step(7)
    assert outer.done and not caplog.messages
    assert outer.step(7) is None and outer.step(7) is None
    (said,) = caplog.messages
    assert "end your loop at outer.done" in said and watched._state.inner.step == 100


@pytest.mark.parametrize("step", [100, 99])
def test_after_the_last_step_a_peer_stays_for_who_has_lost_the_last_round(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left at once, in the middle of what it gave."""
    outer, watched = watched_loop(step)
    outer._process = os.getpid()
    monkeypatch.setattr(OuterLoop, "_leave", lambda self, error: watched.leave())
    outer.close()
    called = [call[0] for call in watched.mock_calls if call[0] in ("_boundary.finish", "_member.stay", "leave")]
    assert called == ["_boundary.finish", *(["_member.stay"] if step == 100 else []), "leave"]


@pytest.mark.parametrize(("remaining", "time_up"), [(5, False), (0, False), (5, True)])
def test_the_swap_is_continued_once_a_step(remaining: int, time_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts these calls as inner steps. At a boundary there were two. ``time_up``: of ``run.inner_time``."""
    monkeypatch.setattr("peer.api.loop.require_finite", lambda *_: None)
    monkeypatch.setattr("peer.api.loop.require_same", lambda *_: None)
    outer, watched = watched_loop()
    watched._length.remaining.return_value, outer._progress = remaining, Mock(time_up=time_up)
    outer.step(7)
    called = [call[0] for call in watched.mock_calls if call[0].startswith("_boundary.")]
    ends = ["_boundary.cut", "_boundary.cross"] if time_up or not remaining else []
    assert called == [*ends, "_boundary.between_steps"]


@pytest.mark.parametrize("where", ["between_steps", "cross"])
def test_a_step_that_did_not_end_is_not_continued(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception may leave a part of a swap neither opened nor asked for: close() waited for it without an end."""
    monkeypatch.setattr("peer.api.loop.require_finite", lambda *_: None)
    monkeypatch.setattr("peer.api.loop.require_same", lambda *_: None)
    outer, watched = watched_loop()
    watched._length.remaining.return_value = 0
    getattr(watched._boundary, where).side_effect = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        outer.step(7)
    with pytest.raises(RunError, match="its last step did not end; start a new one"):
        outer.step(7)
    outer._leave, outer._process = watched.leave, os.getpid()  # type: ignore[method-assign]
    outer.close()
    called = [call[0] for call in watched.mock_calls]
    assert "_boundary.finish" not in called and "leave" in called
    getattr(watched._boundary, where).side_effect = None
    outer.load_state_dict({})  # gives the swap up
    outer.step(7)
    outer.close()
    assert "_boundary.finish" in [call[0] for call in watched.mock_calls]


@pytest.mark.parametrize("error", [None, ZeroDivisionError("of the program"), KeyboardInterrupt()])
def test_after_an_error_the_loop_does_not_wait_for_the_accelerator(error: BaseException | None) -> None:
    """What it does may never end then, as with a rank that is lost."""
    outer, watched = watched_loop()
    outer._timer._synchronize = synchronize = Mock()
    try:
        with outer:
            if error is not None:
                raise error
    except (ZeroDivisionError, KeyboardInterrupt) as raised:
        assert raised is error and raised.__traceback__ is not None
        assert raised.__traceback__.tb_next is None  # as the program has raised it
    assert synchronize.called == (error is None) and watched._stop.request.called


def at_the_programs_end(outer: OuterLoop, watched: Any) -> None:
    watched.at_exit()


def by_a_trainers_callback(outer: OuterLoop, watched: Any) -> None:
    callback = OuterLoopCallback()
    callback.outer = outer
    callback.close()


@pytest.mark.parametrize("leave", [at_the_programs_end, by_a_trainers_callback])
def test_a_loop_that_an_error_left_open_waits_neither_for_the_accelerator_nor_for_a_swap(
    leave: Callable[[OuterLoop, Any], None],
) -> None:
    """Who calls these is not told of the error."""
    outer, watched = watched_loop()
    outer._timer._synchronize = synchronize = Mock()
    leave(outer, watched)
    assert not synchronize.called and not watched._boundary.finish.called and watched._member.close.called


def test_a_loop_whose_step_did_not_end_closes_without_waiting_for_the_accelerator() -> None:
    outer, watched = watched_loop()
    outer._timer._synchronize = synchronize = Mock()
    watched._boundary.between_steps.side_effect = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        outer.step(7)
    outer.close()
    assert not synchronize.called and watched._member.close.called


def test_another_state_is_taken_after_the_running_swap_was_given_up() -> None:
    """Parts and corrections of a swap that went on would change the weights that the program has restored."""
    outer, watched = watched_loop()
    outer.load_state_dict({})
    called = [call[0] for call in watched.mock_calls]
    assert called.index("_boundary.abandon") < called.index("_state.load_state_dict")
    assert called[-1] == "_boundary.between_steps"


def test_a_state_that_is_refused_costs_no_swap() -> None:
    outer, watched = watched_loop()
    watched._state.require.side_effect = UserError("of another run")
    with pytest.raises(UserError, match="of another run"):
        outer.load_state_dict({})
    assert [call[0] for call in watched.mock_calls] == ["_state.require"]


def test_after_a_state_that_no_member_could_replace_the_loop_goes_on_from_it() -> None:
    """The phase before went on, with its length and its clock."""
    outer, watched = watched_loop()
    watched._member.rejoin.side_effect = RunError("no member gave its weights")
    with pytest.raises(RunError, match="no member gave"):
        outer.load_state_dict({})
    assert "_length.begin" in [call[0] for call in watched.mock_calls]


def test_a_loop_that_was_closed_takes_neither_a_step_nor_a_state() -> None:
    outer, watched = watched_loop()
    watched._stop.requested = True
    for slip in (lambda: outer.step(7), lambda: outer.load_state_dict({})):
        with pytest.raises(RunError, match="it was closed; start a new one"):
            slip()
    assert not watched.mock_calls


def restored(outer: OuterLoop) -> None:
    outer.load_state_dict({})


def started(outer: OuterLoop) -> None:
    OuterLoop(nn.Linear(1, 1), Mock(), (), None)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("call", "where"),
    [(OuterLoop.step, "between_steps"), (OuterLoop.close, "finish"), (restored, "abandon"), (started, "trained")],
)
def test_what_a_call_computes_is_outside_the_programs_autocast(
    call: Callable[[OuterLoop], object], where: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoupled momentum was rounded to fp16 within an autocast to it, and ended in a traceback within one to bf16."""
    method = Decoupled(SlowWeights([("weights", nn.Parameter(torch.eye(8)))]), DecoupledConfig(name="decoupled"))
    method.momentum.copy_(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    wanted, found = method.contribution(), list[SparseContribution]()
    outer, watched = watched_loop()
    outer._leave, outer._process = watched.leave, os.getpid()  # type: ignore[method-assign]

    def compute(*_: object) -> None:
        found.append(method.contribution())
        assert not torch.is_autocast_enabled("cuda")
        if where == "trained":
            raise UserError("enough")

    getattr(watched._boundary, where).side_effect = compute
    monkeypatch.setattr("peer.api.loop.trained", compute)
    none = Mock(side_effect=RuntimeError("Cannot access accelerator device when none is available."))  # torch 2.6
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", dtype=kind), suppress(UserError):
            call(outer)
        assert torch.is_autocast_enabled("cuda")  # the program goes on with it
    finally:
        torch.set_autocast_enabled("cuda", False)
    (contribution,) = found
    assert torch.equal(contribution.positions, wanted.positions)
    assert torch.equal(contribution.values, wanted.values)


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        (lambda it: {"optimizer": it}, "optimizer has a Linear; give a torch.optim.Optimizer"),
        (lambda it: {"optimizer": it.parameters()}, "optimizer has a Parameter; give"),
        (lambda it: {"optimizer": [torch.optim.SGD(it.parameters()), None]}, "optimizer has a NoneType; give"),
        (lambda it: {"settings": ["run.steps"]}, "settings is a mapping of keys, such as"),
        (lambda it: {"settings": {1: 2}}, "settings is a mapping of keys, such as"),
    ],
)
def test_a_slip_in_a_program_is_one_line(slip: Callable[[nn.Module], dict[str, Any]], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=said) as caught:
        OuterLoop.start(model, run="test", **slip(model))
    assert "\n" not in str(caught.value)


def test_what_a_loop_does_before_it_has_joined_is_time_of_the_phase_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ``apply``, a phase of rounds."""
    monkeypatch.setattr("peer.api.loop.member_node", node := Mock())
    monkeypatch.setattr("peer.api.loop.connect", Mock())
    seen = []

    def begin(*_: object, **__: object) -> None:
        registry = node.call_args.args[0].metrics.registry
        seen.append(registry.get_sample_value("noloco_phase_info", {"phase": "join"}))
        raise UserError("enough")

    monkeypatch.setattr("peer.api.loop.Membership", begin)
    with pytest.raises(UserError, match="enough"):
        OuterLoop.start(nn.Linear(2, 2), run="test", settings={"run.dir": str(tmp_path), "peer.metrics.port": 0})
    assert seen == [1]


def test_a_loop_that_resumes_alone_has_the_settings_of_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had come from a swarm that is gone; by the defaults its own state was of another run."""
    monkeypatch.setattr("peer.api.loop.member_node", node := Mock(side_effect=UserError("enough")))
    saved, settings = OwnRun(name="own", inner_steps=7), {"run.dir": str(tmp_path), "peer.metrics.port": 0}
    with pytest.raises(UserError, match="enough"):
        OuterLoop.start(nn.Linear(2, 2), run="own", state={"config": canonical(saved)}, settings=settings)
    assert canonical(node.call_args.args[0].run) == canonical(saved)


def test_each_loop_of_a_program_has_a_log_of_its_own(tmp_path: Path) -> None:
    """Each wrote the other's lines under its own name, and after the end of the first the second one wrote none."""

    def begun(name: str) -> tuple[OuterLoop, Any]:
        """A loop that says its name in every step, and its log."""
        outer, watched = watched_loop()
        outer._logfile = tmp_path / f"{name}.log"
        watched._boundary.between_steps = lambda: logs.get_logger("test").info("a step of %s", name)
        log = logs.attached(name, outer._logfile)
        log.__enter__()
        return outer, log

    (one, log_of_one), (two, log_of_two) = begun("one"), begun("two")
    for outer in (one, two, one, two):
        outer.step()
    log_of_one.__exit__(None, None, None)
    two.step()
    log_of_two.__exit__(None, None, None)
    for name, count in (("one", 2), ("two", 3)):
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert len(lines) == count and all(line.endswith(f"INFO peer={name} a step of {name}") for line in lines)
