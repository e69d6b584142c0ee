"""Between a boundary with overlap and the next inner step: a phase has ended, and its outer step has not begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peer.outer.slow_weights import SlowWeights
from peer.rounds.state import State
from peer.training.boundaries.blocking import Blocking
from peer.training.checkpoint import Checkpoints, Saved, Tensors
from peer.training.state import PeerState
from tests.saved import save_checkpoint
from tests.unit import parts
from tests.unit.training.test_boundary import Asking, Exchange, Scene, overlapped, theta


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def other_state(scene: Scene) -> State:
    """A member's, nine rounds later, with a momentum."""
    phi, momentum = (torch.full_like(it, value) for it, value in zip(scene.state.vectors(), (0.5, 0.25), strict=True))
    return State(scene.state.inner.step + 90, scene.state.counters.round + 9, [phi, momentum])


def restarted(scene: Scene, folder: Path) -> tuple[PeerState, Saved]:
    """The state of a new process, from this one's checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    save_checkpoint(checkpoints, scene.state.inner.step, scene.state.scalars(), scene.state.tensors())
    saved = checkpoints.newest(scene.state.refusal)
    assert saved is not None
    again = parts.peer_state()
    again.restore(saved)
    return again, saved


def test_a_restart_takes_the_outer_step_that_was_pending(scene: Scene, tmp_path: Path) -> None:
    """The phase's change was given a second time: a partner had it, and it came on top of weights of hours later."""
    boundary = overlapped(scene, Exchange())
    assert boundary.cross(scene.train()) and scene.state.counters.unopened == 0
    again, _ = restarted(scene, tmp_path)
    boundary.between_steps()
    boundary.await_swap()  # alone
    assert again.counters.unopened is scene.state.counters.unopened is None
    for mine, alone in zip(again.vectors(), scene.state.vectors(), strict=True):
        torch.testing.assert_close(mine, alone)
    assert torch.equal(theta(again), again.outer.slow.phi)
    member = other_state(scene)
    again.rebase(member)
    assert torch.equal(theta(again), member.vectors[0])


@pytest.mark.parametrize("opened", [0, 3, 26, 27])
def test_a_restart_takes_the_outer_step_of_the_parts_that_were_not_open(
    scene: Scene, opened: int, tmp_path: Path
) -> None:
    """While the swap ran nothing said that these parts had no outer step, so their change was given a second time.
    :meth:`peer.OuterLoop.state_dict` at a boundary always came then.
    """

    class Some(Asking):
        def parts_to_open(self, *, idle: bool = False) -> range:
            return range(opened if not idle else len(self.parts))

    boundary = overlapped(scene, Exchange(mailbox=Some))
    assert boundary.cross(scene.train())
    boundary.between_steps()
    again, _ = restarted(scene, tmp_path)
    assert (scene.state.counters.unopened is None) == (opened == 27)
    boundary._advance(idle=True)
    assert again.counters.unopened is scene.state.counters.unopened is None
    for mine, alone in zip(again.vectors(), scene.state.vectors(), strict=True):
        torch.testing.assert_close(mine, alone)
    member = other_state(scene)
    again.rebase(member)
    torch.testing.assert_close(theta(again), member.vectors[0])


def test_steps_that_were_skipped_are_no_delay_of_a_swap(scene: Scene) -> None:
    """With run.inner_time a slow peer's swaps looked twice as late as they were."""
    boundary = overlapped(scene, Exchange(mailbox=Asking))
    assert boundary.cross(scene.train())
    boundary.between_steps()
    swap = boundary._swap
    assert swap is not None
    before, step = dict(swap.opening.steps), scene.state.inner.step
    scene.length.begin()
    boundary.cut()
    skipped = scene.state.inner.step - step
    assert skipped > 0 and swap.opening.steps == {index: it + skipped for index, it in before.items()} != {}


def test_moments_are_not_those_of_the_checkpoints_file(scene: Scene, tmp_path: Path) -> None:
    """It was mapped until the end of the process, so the disk had less room than was counted."""
    scene.train()
    again, saved = restarted(scene, tmp_path)
    mapped = {it.data_ptr() for it in saved.tensors["optimizer"].values()}
    used = {it.data_ptr() for it in again.outer.slow.moments(again.inner.optimizer).values()}
    assert len(mapped) == len(used) > 0 and not mapped & used


def test_moments_go_from_the_checkpoints_file_to_the_device(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were copied on the host before, also those of a GPU: memory for both, and time, for nothing."""
    real, given = SlowWeights.take_moments, []

    def take(slow: SlowWeights, optimizer: Any, tensors: Tensors, **how: bool) -> None:
        given.extend(it.data_ptr() for it in tensors.values())
        real(slow, optimizer, tensors, **how)

    monkeypatch.setattr(SlowWeights, "take_moments", take)
    scene.train()
    _, saved = restarted(scene, tmp_path)
    assert given == [it.data_ptr() for it in saved.tensors["optimizer"].values()] != []


def test_a_swap_does_not_begin_for_weights_that_a_members_have_replaced(scene: Scene) -> None:
    """It was a second step of the member's momentum, given away with the tokens of a phase that was discarded."""
    exchange = Exchange(mailbox=Asking)
    boundary = overlapped(scene, exchange)
    assert boundary.cross(scene.train())
    member = other_state(scene)
    scene.state.adopt(member)
    boundary.between_steps()
    assert exchange.mailboxes == [] and torch.equal(scene.state.outer.slow.phi, member.vectors[0])


def test_a_change_that_is_kept_when_catching_up_is_still_given(scene: Scene) -> None:
    exchange = Exchange(mailbox=Asking)
    boundary = overlapped(scene, exchange)
    assert boundary.cross(scene.train())
    scene.state.rebase(other_state(scene))
    boundary.between_steps()
    assert len(exchange.mailboxes) == 1


@pytest.mark.parametrize("left", [0, 1000])
def test_after_the_last_step_a_peer_judges_before_it_meets(
    scene: Scene, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partner waited for its header and gave up after ten seconds."""
    order: list[str] = []
    boundary = Blocking(*scene.parts(), Exchange())  # type: ignore[arg-type]
    inner = scene.train()
    monkeypatch.setattr(type(scene.length), "steps_left", property(lambda self: left))
    monkeypatch.setattr(boundary, "judge", lambda: order.append("judge"))
    group_for = scene.presence.group_for
    monkeypatch.setattr(scene.presence, "group_for", lambda *round: order.append("meet") or group_for(*round))
    boundary.cross(inner)
    assert order[:2] == (["meet", "judge"] if left else ["judge", "meet"])
