"""A merge after which the training loss jumps is undone; all others stay."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from peer.api.account import StepAccount
from peer.device.copies import Copied
from peer.outer.noloco import NoLoCo
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome
from peer.training.boundaries.rollback import JUDGES, USUAL_LOSSES, Rollback, Trial
from peer.training.state import PeerState
from tests.swarm.support.attacks import gradient
from tests.unit import parts

STEPS = 20
REACH = 4.0  # times ‖βΔ‖


class Peer:
    """A peer at a boundary, after an inner phase of ``STEPS``."""

    def __init__(self) -> None:
        self.state: PeerState = parts.peer_state()
        assert isinstance(self.state.outer, NoLoCo)
        self.outer: NoLoCo = self.state.outer
        self.undone: list[tuple[Trial, str]] = []
        self.rollback = Rollback(self.state, lambda *of: self.undone.append(of))
        self.train(STEPS)

    def train(self, steps: int) -> None:
        def batches() -> object:
            for batch in self.state.stream.take(steps):
                self.rollback.look()
                yield batch

        self.rollback.trained(self.state.inner.run(batches()))  # type: ignore[arg-type]
        self.rollback.look(wait=True)

    def step_with(self, loss: float) -> None:
        self.state.inner.loss, self.state.inner.step = loss, self.state.inner.step + 1
        self.rollback.look()

    def own(self) -> tuple[Tensor, Tensor]:
        """s and βΔ."""
        s, change = torch.empty(self.outer.slow.numel), torch.empty(self.outer.slow.numel)
        self.outer.contribution().read_both(0, s, change)
        return s, change

    def harm(self) -> Tensor:
        """A correction along the gradient of the loss, as long as the guard lets it be."""
        way = gradient(self.state)
        return REACH * self.own()[1].norm() / way.norm() * way

    def merge(self, correction: Tensor) -> None:
        merged = self.outer.merge(self.own()[0] + correction)
        self.rollback.begin([(0, merged)], merge())

    def tensors(self) -> list[Tensor]:
        return [self.outer.slow.phi.clone(), self.outer.momentum.clone(), parts.theta(self.state)]


def merge() -> Averaged:
    return Averaged(torch.empty(0), Outcome.MERGED, partners=("b",), partner_id="id-b")


@pytest.fixture
def peer() -> Peer:
    return Peer()


def losses_of(peer: Peer, batches: list[Tensor]) -> list[float]:
    return [peer.state.inner.evaluate([it]) for it in batches]


def test_a_merge_gives_the_correction_that_it_was(peer: Peer) -> None:
    twin = Peer().outer
    correction = 0.01 * torch.randn(peer.outer.slow.numel, generator=torch.Generator().manual_seed(0))
    mean = peer.own()[0] + correction
    twin.apply(mean.clone())
    torch.testing.assert_close(peer.outer.merge(mean), correction, atol=1e-6, rtol=1e-4)
    assert torch.equal(peer.outer.slow.phi, twin.slow.phi) and torch.equal(peer.outer.momentum, twin.momentum)


def test_after_a_harmful_merge_weights_and_momentum_are_those_of_a_peer_that_was_alone(peer: Peer) -> None:
    alone = Peer().outer
    alone.apply(peer.own()[0])
    peer.merge(peer.harm())
    merged = peer.tensors()[2]
    peer.train(2)
    ((trial, detail),) = peer.undone
    assert trial.merge is not None and trial.merge.partner_id == "id-b" and "after this merge" in detail
    assert peer.rollback.trial is None
    phi, momentum, theta = peer.tensors()
    torch.testing.assert_close(phi, alone.slow.phi, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(momentum, alone.momentum, atol=1e-6, rtol=1e-5)
    assert (theta - alone.slow.phi).norm() < 0.3 * (merged - alone.slow.phi).norm()  # what two steps have trained


def test_losses_that_come_together_undo_a_merge_once(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an accelerator: four of them took it back four times, and the partner had as many offences."""
    peer.merge(peer.harm())
    monkeypatch.setattr(Copied, "arrived", lambda loss, *, wait=False: wait)
    usual = peer.rollback.trial.usual if peer.rollback.trial is not None else 0.0
    for _ in range(4):
        peer.step_with(10 * usual)
    merged = peer.tensors()[0]
    assert peer.undone == []
    peer.rollback.judge_before_next(left=100)
    ((trial, _),) = peer.undone
    (_, correction) = trial.corrections[0]
    torch.testing.assert_close(peer.tensors()[0], merged - correction, atol=1e-6, rtol=0)


def test_an_honest_merge_stays(peer: Peer) -> None:
    other = Peer()
    other.train(3)  # it has read further in the data
    peer.merge((other.own()[0] - peer.own()[0]) / 2)
    before = peer.tensors()[:2]
    peer.train(JUDGES)
    assert peer.undone == [] and peer.rollback.trial is None
    assert all(torch.equal(one, two) for one, two in zip(before, peer.tensors()[:2], strict=True))


def test_only_the_first_steps_after_the_merge_judge(peer: Peer) -> None:
    peer.merge(torch.zeros(peer.outer.slow.numel))
    peer.rollback.look()
    assert peer.rollback.trial is not None and not peer.rollback.trial.losses  # the last loss is older than the merge
    peer.train(JUDGES - 1)
    assert peer.rollback.trial is not None
    peer.train(1)
    assert peer.rollback.trial is None
    peer.step_with(1e9)
    assert peer.undone == []


@pytest.mark.parametrize("harmful", [False, True])
def test_without_a_further_step_the_merge_is_judged_by_a_validation(peer: Peer, harmful: bool) -> None:
    batches = [*parts.stream(5).take(4)]
    peer.merge(peer.harm() if harmful else torch.zeros(peer.outer.slow.numel))
    before = peer.tensors()
    peer.rollback._sample = lambda: [peer.state.inner.evaluate([it]) for it in batches]
    peer.rollback.judge_before_next(left=100)
    assert len(peer.undone) == harmful and peer.rollback.trial is None
    for one, two in zip(before, peer.tensors(), strict=True):
        assert torch.allclose(one, two, atol=1e-6) != harmful


@pytest.mark.parametrize("left", [JUDGES - 1, JUDGES])
def test_at_the_end_of_a_run_a_few_steps_are_not_enough_to_judge(peer: Peer, left: int) -> None:
    peer.merge(0.01 * peer.harm())
    peer.train(1)
    losses = iter([1.1, 1.0])
    peer.rollback._sample = lambda: [next(losses)]
    peer.rollback.judge_before_next(left=left)
    assert len(peer.undone) == (left < JUDGES)


@pytest.mark.parametrize(("last", "undone"), [(1.01, 0), (1.03, 1)])
def test_after_the_last_step_the_loss_without_a_merge_is_known(peer: Peer, last: float, undone: int) -> None:
    losses = iter([1.0, 1.0, 1.01, last * 1.01, 1.01])
    peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of), lambda: [next(losses)])
    peer.train(STEPS)
    peer.rollback.training_ended()
    for _ in range(3):
        peer.merge(torch.zeros(peer.outer.slow.numel))
        peer.rollback.judge_before_next(left=0)
    assert len(peer.undone) == undone
    assert len(list(losses)) == 1 - undone  # two samples, one, and one or two


def test_the_parts_of_a_swap_are_judged_while_they_come_and_undone_together(peer: Peer) -> None:
    corrections: list[tuple[int, Tensor]] = []
    harm, half = peer.harm(), peer.outer.slow.numel // 2
    for start, stop in ((0, half), (half, len(harm))):
        peer.outer.open(peer.outer.slow.fetch(start, stop), torch.empty(stop - start), torch.empty(stop - start))
    before = peer.tensors()
    peer.rollback.begin(corrections, None)
    peer.train(1)
    assert peer.rollback.trial is not None and not peer.rollback.trial.losses  # nothing has come yet
    for start, stop in ((0, half), (half, len(harm))):
        peer.outer.amend(start, harm[start:stop])
        corrections.append((start, harm[start:stop].bfloat16()))
    peer.train(2)
    ((trial, _),) = peer.undone
    assert trial.merge is None and peer.rollback.trial is None
    for one, two in zip(before[:2], peer.tensors()[:2], strict=True):
        torch.testing.assert_close(one, two, atol=0.01 * float(harm.abs().max()), rtol=0)  # bf16 has 8 bits
    assert (peer.tensors()[2] - before[2]).norm() < 0.1 * harm.norm()


@pytest.mark.parametrize(
    ("factors", "undone"),
    [((3.5,), False), ((4.5,), False), ((4.5, 4.5), True), ((3.5, 3.5), True), ((2.5, 2.5), False)],
)
def test_single_losses_scatter_so_a_jump_is_more_than_their_noise(
    peer: Peer, factors: tuple[float, ...], undone: bool
) -> None:
    """Batches of few tokens have losses far apart. ``factors``: standard deviations above what is usual."""
    peer.merge(torch.zeros(peer.outer.slow.numel))
    trial = peer.rollback.trial
    assert trial is not None and 2.5 * trial.spread > 0.1 * trial.usual
    for factor in factors:
        peer.step_with(trial.usual + factor * trial.spread)
    assert bool(peer.undone) == undone


@pytest.mark.parametrize(
    ("losses", "undone"),
    [((3.0,), 0), ((2.1, 3.0), 0), ((3.0, 2.1, 3.0, 1.9), 0), ((3.0, 3.0), 1), ((2.0, 3.0, 3.0), 1)],
)
def test_in_a_loop_of_its_own_one_unusual_batch_undoes_nothing(
    peer: Peer, losses: tuple[float, ...], undone: int
) -> None:
    """An honest merge was undone for it, and its partner left out; no loss without the merge was measured."""
    rollback = peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of))
    rollback.trained(phase_of(*[2.1, 1.9] * 10))
    peer.merge(torch.zeros(peer.outer.slow.numel))
    for loss in losses:
        peer.step_with(loss)
    assert [detail for _, detail in peer.undone] == ["the loss was 3 after this merge and 2 before it"] * undone


def test_a_loss_that_says_nothing_is_not_the_first_of_two(peer: Peer) -> None:
    rollback = peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of))
    rollback.trained(phase_of(*[2.1, 1.9] * 10, math.nan))
    peer.merge(torch.zeros(peer.outer.slow.numel))
    for loss in (math.nan, 3.0, math.nan):
        peer.step_with(loss)
    assert peer.undone == []
    peer.step_with(3.0)
    assert len(peer.undone) == 1


@pytest.mark.parametrize("harmful", [False, True])
def test_a_batch_of_unusual_text_undoes_nothing_when_the_loss_on_others_is_no_higher(peer: Peer, harmful: bool) -> None:
    batches = [*parts.stream(5).take(4)]
    inner = peer.state.inner
    peer.rollback = Rollback(
        peer.state, lambda *of: peer.undone.append(of), lambda: [inner.evaluate([it]) for it in batches]
    )
    peer.train(STEPS)
    peer.merge(peer.harm() if harmful else torch.zeros(peer.outer.slow.numel))
    before, trial = peer.tensors(), peer.rollback.trial
    assert trial is not None and inner.model.training
    peer.step_with(trial.usual + 10 * trial.spread)
    assert len(peer.undone) == harmful and inner.model.training
    if not harmful:
        assert peer.rollback.trial is trial and not trial.losses  # the next losses judge it
        for one, two in zip(before, peer.tensors(), strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("ratio", "undone"), [(1.05, False), (1.15, True)])
def test_a_jump_is_confirmed_by_as_much_as_it_takes_to_be_one(peer: Peer, ratio: float, undone: bool) -> None:
    """While the parts of a swap come, a model that has half of them may be a little worse."""
    losses = iter([ratio, 1.0])
    peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of), lambda: [next(losses)])
    peer.train(STEPS)
    peer.merge(torch.zeros(peer.outer.slow.numel))
    peer.step_with(1e9)
    assert bool(peer.undone) == undone


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(("then", "undone"), [("ok", False), ("broken", True)])
def test_in_a_loop_of_its_own_one_loss_that_is_not_finite_undoes_nothing(
    peer: Peer, broken: float, then: str, undone: bool
) -> None:
    """A batch whose labels are all masked has the loss NaN and no gradient: an honest merge was undone for it."""
    peer.merge(torch.zeros(peer.outer.slow.numel))
    trial = peer.rollback.trial
    assert trial is not None
    for loss in (trial.usual, broken, trial.usual, broken):
        peer.step_with(loss)
    assert peer.undone == [] and list(trial.losses) == [trial.usual] * 2
    peer.step_with(broken if then == "broken" else trial.usual)
    assert bool(peer.undone) == undone


@pytest.mark.parametrize(("broken", "undone"), [(STEPS, False), (STEPS // 2, False), (1, False), (0, True)])
def test_a_loss_that_was_not_finite_before_the_merge_says_nothing_of_it(
    peer: Peer, broken: int, undone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its partner was left out each time, "the loss was nan with this partner's weights and 1.6 without them". Of two
    masked batches in succession by chance the same was said.
    """
    told = [math.nan if step < broken else 1.0 for step in range(STEPS)]
    for _ in range(2):
        peer.rollback.trained(phase_of(*told))
    peer.merge(torch.zeros(peer.outer.slow.numel))
    for _ in range(3):
        peer.step_with(math.nan)
    assert bool(peer.undone) == undone
    assert caplog.text.count("they judge no merge") == (2 * broken > STEPS)


@pytest.mark.parametrize("late", [False, True])
def test_losses_that_are_not_finite_by_a_merge_that_was_undone_are_not_usual(
    peer: Peer, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such merge was undone, and each second one after it stayed. ``late``: as from an accelerator, the losses come
    after further steps.
    """
    if late:
        monkeypatch.setattr(Copied, "arrived", lambda loss, *, wait=False: wait)
    peer.rollback.trained(phase_of(*[1.0] * STEPS))
    for merges in range(1, 4):
        peer.merge(torch.zeros(peer.outer.slow.numel))
        broken = 4 if late else 2
        for _ in range(broken):
            peer.step_with(math.nan)
        peer.rollback.trained(phase_of(*[math.nan] * broken, *[1.0] * (STEPS - broken)))
        assert len(peer.undone) == merges


def test_losses_that_stay_broken_without_the_merge_that_was_undone_blame_no_further_one(peer: Peer) -> None:
    for _ in range(3):
        peer.merge(torch.zeros(peer.outer.slow.numel))
        for _ in range(STEPS):
            peer.step_with(math.nan)
        peer.rollback.trained(phase_of(*[1.0], *[math.nan] * STEPS))
    assert len(peer.undone) == 1


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_after_phases_with_a_loss_that_is_not_finite_the_others_judge(peer: Peer, broken: float) -> None:
    """One of them made the mean of its phase NaN, and without a usual loss nothing was undone."""
    rollback = peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of))
    for _ in range(3):
        rollback.trained(phase_of(2.0, broken, 2.1, 1.9))
    peer.merge(peer.harm())
    for _ in range(2):
        peer.step_with(4.0)
    assert len(peer.undone) == 1


def test_where_validation_batches_decide_the_first_loss_that_is_not_finite_asks_them(peer: Peer) -> None:
    losses = iter([math.nan, 1.0])
    peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of), lambda: [next(losses)])
    peer.train(STEPS)
    peer.merge(torch.zeros(peer.outer.slow.numel))
    peer.step_with(math.nan)
    assert len(peer.undone) == 1


@pytest.mark.parametrize(("harm", "undone"), [((0.3, -0.1, 0.3, -0.1), False), ((0.12, 0.1, 0.08, 0.1), True)])
def test_a_difference_that_a_few_batches_show_by_chance_undoes_nothing(
    peer: Peer, harm: tuple[float, ...], undone: bool
) -> None:
    """Of 128 tokens an honest merge seemed to cost 2.5%, and the last merges of a run were taken back."""
    losses = iter([[2.0 + it for it in harm], [2.0] * len(harm)])
    peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of), lambda: next(losses))
    peer.train(STEPS)
    peer.merge(torch.zeros(peer.outer.slow.numel))
    peer.rollback.judge_before_next(left=0)
    assert bool(peer.undone) == undone


def test_weights_that_replace_all_end_the_trial(peer: Peer) -> None:
    peer.merge(peer.harm())
    peer.state.adopt(Peer().state.snapshot())
    before = peer.tensors()[:2]
    peer.train(2)
    assert peer.undone == []
    assert all(torch.equal(one, two) for one, two in zip(before, peer.tensors()[:2], strict=True))


def phase_of(*losses: float | None) -> InnerReport:
    account = StepAccount()
    for loss in losses:
        account.add(10, loss)
    return account.report(0.1)


@pytest.mark.parametrize("phases", [1, 2, USUAL_LOSSES])
def test_a_loop_that_tells_one_loss_a_phase_undoes_nothing_until_it_is_known_how_losses_scatter(
    peer: Peer, phases: int
) -> None:
    """Of one loss the spread was NaN, with which a loss 10% above it was a jump."""
    rollback = peer.rollback = Rollback(peer.state, lambda *of: peer.undone.append(of))
    told = [2.0 + 0.2 * (-1) ** number for number in range(phases)]
    for loss in told:
        rollback.trained(phase_of(*[None] * 49, loss))
    peer.merge(torch.zeros(peer.outer.slow.numel))
    trial = peer.rollback.trial
    assert trial is not None and trial.usual == pytest.approx(fmean(told))
    assert math.isnan(trial.spread) if phases == 1 else trial.spread == pytest.approx(stdev(told))
    peer.step_with(1.15 * trial.usual)
    assert peer.undone == [] and trial.judged == (0 if phases == 1 else peer.state.inner.step)
    for _ in range(2):
        peer.step_with(1e9)
    assert len(peer.undone) == (phases > 1)


@pytest.mark.parametrize(("after", "undone"), [(JUDGES, True), (JUDGES + 1, False)])
def test_a_loss_that_is_told_long_after_a_merge_does_not_judge_it(peer: Peer, after: int, undone: bool) -> None:
    peer.merge(torch.zeros(peer.outer.slow.numel))
    peer.state.inner.loss = None
    for _ in range(after - 2):
        peer.state.inner.step += 1
        peer.rollback.look()
    peer.step_with(1e9)
    assert not peer.undone
    peer.step_with(1e9)
    assert bool(peer.undone) == undone and peer.rollback.trial is None


def test_the_losses_of_weights_that_were_replaced_are_not_usual(peer: Peer) -> None:
    peer.merge(peer.harm())
    peer.state.take_outer(peer.state.saved_vectors())
    peer.rollback.look()
    assert peer.rollback.trial is None
    peer.merge(torch.zeros(peer.outer.slow.numel))
    assert peer.rollback.trial is None


def test_a_loop_that_tells_no_loss_undoes_nothing(peer: Peer) -> None:
    rollback = Rollback(peer.state, lambda *of: peer.undone.append(of))
    rollback.trained(phase_of(None, None))
    rollback.begin([(0, peer.harm())], merge())
    assert rollback.trial is None


@pytest.mark.parametrize("sampled", [False, True])
def test_steps_that_a_slow_peer_did_not_make_do_not_save_a_merge_from_its_judgement(sampled: bool) -> None:
    """``run.inner_time`` ends a phase of 50 after a few steps: the swarm's step, and with it the last loss, counted as
    one long after the merge.
    """
    peer = Peer()
    losses = iter([[99.0, 99.0], [2.0, 2.0]])
    peer.rollback._sample = (lambda: next(losses)) if sampled else None
    peer.merge(peer.harm())
    peer.rollback.all_applied(merge())
    if not sampled:
        peer.step_with(99.0)
        assert not peer.undone
    peer.state.inner.loss, peer.state.inner.step = 99.0, peer.state.inner.step + 1  # the last step, and no look since
    peer.rollback.skip(47)
    peer.state.inner.step += 47
    peer.rollback.judge_before_next(left=1000)
    assert len(peer.undone) == 1


def test_a_loss_before_a_cut_counts_once_and_the_next_ones_as_usual() -> None:
    peer = Peer()
    peer.merge(peer.harm())
    peer.rollback.all_applied(merge())
    peer.step_with(2.0)
    peer.rollback.skip(47)
    peer.state.inner.step += 47
    trial = peer.rollback.trial
    assert trial is not None
    peer.rollback.look(wait=True)
    assert list(trial.losses) == [2.0]
    peer.step_with(99.0)
    assert not peer.undone
    peer.step_with(99.0)
    assert len(peer.undone) == 1


def test_after_a_members_weights_were_taken_their_losses_are_not_usual() -> None:
    """After a member's weights were taken the next honest merge was undone, and its partner blamed."""
    peer = Peer()
    peer.state.adopt(peer.state.snapshot())
    peer.merge(peer.own()[0] * 0)
    peer.rollback.all_applied(merge())
    for _ in range(2):
        peer.step_with(99.0)
    assert not peer.undone
