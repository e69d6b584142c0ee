"""Peers of a group of equals: whose slow weights are the same, and how one that missed a round comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.config.methods import DecoupledConfig, DiLoCoConfig, LocalConfig, NoLoCoConfig
from peer.config.schema import RunConfig
from peer.outer.method import outer_method
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.rounds.contribution import PART
from peer.rounds.state import Lineage, State
from peer.swarm.healing import STALE_ROUNDS, Origin
from peer.training.catch_up import catch_up
from peer.training.outer_state import Counters
from peer.training.state import PeerState
from tests.unit import parts
from tests.unit.parts import contribution, theta

H = 3


def apply(state: PeerState, mean: Tensor, digest: str) -> None:
    state.outer.apply(mean)
    state.cross_boundary(digest)


def test_catching_up_takes_the_slow_weights_and_keeps_what_was_trained() -> None:
    ahead, behind = parts.peer_state(), parts.peer_state()
    for number in range(3):
        ahead.inner.run(ahead.stream.take(H))
        apply(ahead, contribution(ahead), f"digest {number}")
    behind.inner.run(behind.stream.take(2 * H))
    ahead.inner.run(ahead.stream.take(H))  # the donor stands at its boundary, too
    trained = theta(behind) - behind.outer.slow.phi
    moments = {key: value["exp_avg"].clone() for key, value in behind.inner.optimizer.state.items()}
    donor = theta(ahead).clone()

    behind.rebase(ahead.snapshot())

    assert torch.equal(behind.outer.slow.phi, ahead.outer.slow.phi)
    assert torch.equal(behind.outer.momentum, ahead.outer.momentum)  # type: ignore[arg-type]
    torch.testing.assert_close(theta(behind) - behind.outer.slow.phi, trained, atol=1e-6, rtol=1e-4)
    assert (behind.counters.lineage, behind.counters.round) == (ahead.counters.lineage, 3)
    assert behind.inner.step == ahead.inner.step == 4 * H
    for key, before in moments.items():
        assert torch.equal(behind.inner.optimizer.state[key]["exp_avg"], before)
    assert torch.equal(theta(ahead), donor)


class TightWeights(SlowWeights):
    """On a device that has room for one part of a change."""

    def add_to_fast(self, change: Tensor, start: int = 0) -> None:
        if change.numel() > PART:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super().add_to_fast(change, start)


def test_a_full_device_takes_nothing_of_what_was_trained() -> None:
    """After a pause the peer tried again, and had the swarm's weights without its own change."""
    net = torch.nn.Linear(PART // 256, 512)
    outer = NoLoCo(TightWeights(net.named_parameters()), NoLoCoConfig())
    state = PeerState(parts.inner_loop(net), outer, parts.stream(), "digest", {})
    theirs, trained = torch.full((outer.slow.numel,), 0.5), torch.linspace(-1, 1, outer.slow.numel)
    SlowWeights.add_to_fast(outer.slow, trained)
    state.rebase(State(H, 1, [theirs, torch.zeros_like(theirs)]))
    assert torch.equal(outer.slow.phi, theirs)
    torch.testing.assert_close(theta(state), theirs + trained)


def test_what_rounding_has_kept_is_this_peers_own() -> None:
    """Nobody gets it of another peer; it stays with this peer's change, and goes when that goes."""
    donor, own = parts.peer_state(feedback=True), parts.peer_state(feedback=True)
    assert donor.kept is not None and own.kept is not None
    donor.kept.normal_()
    own.kept.normal_()
    before = own.kept.clone()
    assert len(donor.snapshot().vectors) == len(own.room()) == 2
    own.rebase(donor.snapshot())
    assert torch.equal(own.kept, before)
    own.rebase(donor.snapshot(), torch.zeros_like(before))  # the others have used what it sent
    assert not own.kept.any()
    own.kept.copy_(before)
    own.adopt(donor.snapshot())
    assert not own.kept.any() and donor.kept.any()
    assert parts.peer_state().kept is None


@pytest.mark.parametrize(("newest", "restored"), [(True, True), (False, True), (False, False)])
def test_what_a_checkpoint_has_kept_may_have_been_sent_since(newest: bool, restored: bool) -> None:
    """A peer that was killed sent it again with the group's weights, which contain it. After a pause nobody has it."""
    resumed, donor = parts.peer_state(feedback=True), parts.peer_state(feedback=True)
    for state in (resumed, donor):
        state.inner.run(state.stream.take(H))
        state.cross_boundary("digest")
    for _ in range(0 if newest else 1 + STALE_ROUNDS):
        donor.cross_boundary("another")
    assert resumed.kept is not None
    resumed.kept.normal_()
    catch_up(resumed, Others(donor), 60.0, restored=restored)  # type: ignore[arg-type]
    assert torch.equal(resumed.outer.slow.phi, donor.outer.slow.phi)
    assert bool(resumed.kept.any()) is (newest or not restored)


def test_the_lineage_is_that_of_all_rounds_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def lineage(*digests: str) -> Lineage:
        state = parts.peer_state()
        for digest in digests:
            state.cross_boundary(digest, members=3)
        return state.counters.lineage

    assert lineage("a", "b") == lineage("b", "a") == Lineage("", 6)  # unequal replicas know what they began with
    monkeypatch.setattr(NoLoCo, "equal_replicas", True)
    assert lineage() == lineage("") == Lineage()
    assert lineage("a", "b") == lineage("a", "b") == lineage("a", "", "b")
    assert len({lineage("a"), lineage("b"), lineage("a", "b"), lineage("b", "a")}) == 4
    assert (len(lineage("a", "b").digest), lineage("a", "b").contributions) == (32, 6)


def test_a_newcomer_stands_where_its_donor_stands_between_two_boundaries() -> None:
    donor, newcomer = parts.peer_state(), parts.peer_state()
    donor.inner.run(donor.stream.take(H))
    apply(donor, contribution(donor), "digest")
    donor.inner.run(donor.stream.take(2))
    newcomer.adopt(donor.snapshot())
    assert newcomer.inner.step == donor.inner.step == H + 2
    assert newcomer.counters == Counters(
        round=1, phase_steps_done=2, boundary_step=H, lineage=donor.counters.lineage, tokens=0
    )
    assert torch.equal(theta(newcomer), donor.outer.slow.phi)


def test_a_checkpoint_knows_its_lineage() -> None:
    state = parts.peer_state()
    state.cross_boundary("digest", members=2)
    assert state.scalars()["lineage"] == state.counters.lineage == Lineage("", 2)


@pytest.mark.parametrize(("behind", "taken"), [(STALE_ROUNDS, False), (STALE_ROUNDS + 1, True)])
def test_who_resumes_from_before_its_last_merges_takes_them_from_others(behind: int, taken: bool) -> None:
    """AdamW's moments are its own: nothing is lost but the inner steps since the last merge."""
    donor, resumed = parts.peer_state(), parts.peer_state()
    resumed.inner.run(resumed.stream.take(H))
    apply(resumed, contribution(resumed), "")
    for _ in range(1 + behind):
        donor.inner.run(donor.stream.take(H))
        apply(donor, contribution(donor), "")
    moments = {key: value["exp_avg"].clone() for key, value in resumed.inner.optimizer.state.items()}

    catch_up(resumed, Others(donor), 60.0)  # type: ignore[arg-type]

    assert torch.equal(resumed.outer.slow.phi, donor.outer.slow.phi) is taken
    assert resumed.inner.step == (donor.inner.step if taken else H)
    assert moments and all(
        torch.equal(resumed.inner.optimizer.state[key]["exp_avg"], it) for key, it in moments.items()
    )


def test_a_checkpoint_that_is_older_than_the_last_rounds_is_no_reason_to_do_them_again() -> None:
    """One round behind others: kept, unless this peer was further than both when it was killed."""
    for reached, taken in ((0, False), (1 + STALE_ROUNDS, False), (2 + STALE_ROUNDS, True)):
        donor, resumed = parts.peer_state(), parts.peer_state()
        for state, rounds in ((resumed, 1), (donor, 2)):
            for _ in range(rounds):
                state.inner.run(state.stream.take(H))
                apply(state, contribution(state), "")
        catch_up(resumed, Others(donor), 60.0, reached=reached)  # type: ignore[arg-type]
        assert resumed.counters.round == (2 if taken else 1), reached


@pytest.mark.parametrize("method", [DiLoCoConfig(name="diloco"), DecoupledConfig(name="decoupled")])
def test_groups_whose_builds_drew_other_weights_are_not_of_one_lineage(method: DiLoCoConfig | DecoupledConfig) -> None:
    """They averaged the changes of unrelated models for ever."""
    zero, same, one = (state_by(method, seed).counters.lineage for seed in (0, 0, 1))
    assert zero == same != one and zero.contributions == one.contributions == 0
    assert state_by(NoLoCoConfig(), 0).counters.lineage == Lineage()  # its replicas differ anyway


@pytest.mark.parametrize("resumed", [False, True])
def test_a_peer_without_exchange_takes_no_weights_of_others(resumed: bool) -> None:
    donor, alone = (state_by(LocalConfig(name="local")) for _ in range(2))
    for state, rounds in ((donor, 2 + STALE_ROUNDS), (alone, int(resumed))):
        for _ in range(rounds):
            state.inner.run(state.stream.take(H))
            apply(state, theta(state), "")
    phi, step = alone.outer.slow.phi.clone(), alone.inner.step

    catch_up(alone, Others(donor), 60.0, reached=2 + STALE_ROUNDS)  # type: ignore[arg-type]

    assert torch.equal(alone.outer.slow.phi, phi) and torch.equal(theta(alone), phi)
    assert (alone.inner.step, alone.counters.round) == (step, int(resumed))
    assert alone.counters.root and alone.counters.root != donor.counters.root


def state_by(method: NoLoCoConfig | DiLoCoConfig | DecoupledConfig | LocalConfig, seed: int = 0) -> PeerState:
    net = parts.network(seed)
    outer = outer_method(RunConfig(outer=method), SlowWeights(net.named_parameters()))
    return PeerState(parts.inner_loop(net), outer, parts.stream(), "digest", {})


class Others:
    """A swarm of one member."""

    def __init__(self, donor: PeerState) -> None:
        self._donor = donor
        self.origin = Origin()

    def others(self) -> list[PeerState]:
        return [self._donor]

    def take_state(self, room: list[Tensor], timeout: float, *, above: int, reached: int) -> State | None:
        return self._donor.snapshot() if self._donor.counters.round > above else None
