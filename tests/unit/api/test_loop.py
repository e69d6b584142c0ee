"""The loop itself, without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from peer.api.loop import OuterLoop

NAMES = ("_state", "_boundary", "_training", "_account", "_member", "_length", "_phase", "_progress", "_stop", "_model")


def watched_loop(step: int = 5, total: int = 100) -> tuple[OuterLoop, Any]:
    """A loop whose parts are watched, ``step`` of ``total`` steps in."""
    outer, watched = object.__new__(OuterLoop), Mock()
    for name in NAMES:
        setattr(outer, name, getattr(watched, name))
    outer._total, outer._optimizers = total, ()
    watched._stop.requested, watched._member.presence.failure = False, ""
    watched._state.inner.step = step
    watched._state.counters = SimpleNamespace(tokens=0, phase_tokens=0, phase_steps_done=0)
    watched._member.reporter = SimpleNamespace(count=0, recent=(), last=None, inner=lambda report: None)
    watched._state.outer.slow.spans = ()
    watched._length.remaining.return_value, watched._length.time_up = 5, False
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


def test_another_state_is_taken_after_the_running_swap_was_given_up() -> None:
    """Parts and corrections of a swap that went on would change the weights that the program has restored."""
    outer, watched = watched_loop()
    outer.load_state_dict({})
    called = [call[0] for call in watched.mock_calls]
    assert called.index("_boundary.abandon") < called.index("_state.load_state_dict")
    assert called[-1] == "_boundary.between_steps"
