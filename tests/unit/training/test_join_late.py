"""A peer that trains already takes the weights of others: only such as are worth it, and all of them or none."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.config.load import load
from peer.errors import RunError
from peer.rounds.progress import Progress
from peer.rounds.state import State
from peer.swarm.context import BoundaryClock
from peer.swarm.healing import STALE_ROUNDS, DivergenceTracker, Origin, PositionBounds, Replacement
from peer.swarm.presence import Presence
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.training.catch_up import join_late
from peer.training.state import PeerState
from peer.training.validation import Validation
from tests.swarm.support.harness import DEMO, TINY
from tests.unit import parts
from tests.unit.parts import alone, theta

H = 5


class Strangers:
    """A swarm of one other member, which this peer has nothing in common with."""

    call_off = Presence.call_off

    def __init__(self, phi: Tensor | None, further: int = 0) -> None:
        self.phi, self.origin, self.noted = phi, Origin(), list[bool]()
        self.ids, self.liars, self.asked = ["b"], list[str](), list[str]()
        self.rooms = list[Sequence[Tensor]]()
        self._further = further  # a latecomer's swarm is, by as many rounds
        self.bounds = PositionBounds()
        self.progress = Progress()
        self._context = SimpleNamespace(boundary=BoundaryClock(self.progress))
        self.called_off = list[str]()
        self.matchmaking = SimpleNamespace(call_off=self.called_off.append)
        self._divergence, self._counters = DivergenceTracker(), SimpleNamespace(round=9)
        self._failed_takes = self._joins_from = self._taken = 0
        self.announce = lambda: None
        self.told = list[float | None]()  # seconds to its boundary, to others, at each download

    def replacement(self) -> Replacement | None:
        if self._further:
            return Replacement("late", 9 + STALE_ROUNDS, adopt=True, bounds=self.bounds)
        return Replacement("diverged", -1, adopt=True, ids=self.ids, bounds=self.bounds) if self.ids else None

    def take_state(
        self, room: Sequence[Tensor], timeout: float, *, above: int, among: Collection[str], without: Collection[str]
    ) -> State | None:
        assert list(among) == ([] if self._further else self.ids) and timeout == 0
        assert self.called_off == ["takes the weights of others"]
        self.told.append(self._context.boundary.eta())
        if self.phi is None:
            raise RunError("no member gave its weights")
        donors = [*self.liars, "b"]
        donor = next((it for it in donors if it not in without), None)
        if donor is None:
            return None
        self.asked.append(donor)
        self.rooms.append(room)
        for vector in room:
            vector.copy_(noise(self.phi) if donor in self.liars else self.phi)
        round = 7 + self._further
        return State(step=round * H, round=round, vectors=room, donor=donor)

    def note_replacement(self, strangers: Collection[str], *, taken: bool) -> None:
        self.noted.append(taken)
        Presence.note_replacement(self, (), taken=taken)  # type: ignore[arg-type]

    def _forgive(self, peers: Collection[str]) -> None:
        assert not peers


def clock() -> ActivityTimer:
    return ActivityTimer(Metrics(), lambda: None)


def trained(rounds: int = 9) -> PeerState:
    state = parts.peer_state()
    for _ in range(rounds):
        state.inner.run(state.stream.take(H))
        alone(state)
        state.cross_boundary()
    return state


def validation(state: PeerState) -> Validation:
    chance = math.log(load(DEMO, TINY).run.data.tokenizer.vocabulary)
    return Validation(state, clock(), chance, list(parts.stream(1).take(2)), {})


def everything(state: PeerState) -> list[Tensor]:
    moments = [it["exp_avg"] for it in state.inner.optimizer.state.values()]
    return [it.clone() for it in (theta(state), *state.vectors(), *moments)]


def noise(like: Tensor) -> Tensor:
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return drawn * like.norm() / drawn.norm()


def test_good_weights_are_taken_whole_and_the_optimizer_begins_anew() -> None:
    state = trained()
    phi = worse(state, validation(state), 1.1)
    presence = Strangers(phi)
    assert join_late(state, presence, clock(), validation(state))  # type: ignore[arg-type]
    assert torch.equal(theta(state), phi) and torch.equal(state.outer.slow.phi, phi)
    assert (state.counters.round, state.inner.step) == (7, 7 * H)  # also of those who are less far
    assert not state.inner.optimizer.state
    assert presence.noted == [True]


@pytest.mark.parametrize(("further", "round"), [(0, 9), (20, 12)])
def test_weights_are_taken_and_their_position_is_bounded(
    further: int, round: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = trained()
    presence = Strangers(trained(20).outer.slow.phi, further=further)
    presence.bounds = PositionBounds((9, 12.5), (9 * H, 12 * H))
    assert join_late(state, presence, clock(), validation(state))  # type: ignore[arg-type]
    assert (state.counters.round, state.inner.step) == (round, round * H)
    assert presence.origin.since == round
    assert (f"said={7 + further} round={round}" in caplog.text) == (further > 0)  # a restart takes no lower one


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_nobody_waits_for_a_peer_that_takes_the_weights_of_others(overlap: bool, taken: bool) -> None:
    """A download may take minutes. Its meeting was called off after it, and others were told of its boundary meanwhile:
    of one that is now, or, without overlap, in one phase. Who has got no weights goes on as before; it met nobody
    while it evaluated.
    """
    state = trained()
    presence: Any = Strangers(state.outer.slow.phi.clone() if taken else None)
    progress, told = presence.progress, presence._context.boundary
    progress.step_seconds = 1.0
    progress.begin(0, H)
    if not overlap:
        with told.at_end_of(progress.phase_number):
            pass
    assert told.eta() == (0.0 if overlap else H)
    assert join_late(state, presence, clock()) is taken
    assert presence.told == [None]
    assert told.eta() == (None if taken else 0.0 if overlap else H)
    progress.begin(H, H)
    assert told.eta() is not None


@pytest.mark.parametrize("phi", ["noise", "nobody"])
def test_without_good_ones_everything_is_as_it_was_to_the_bit(phi: str) -> None:
    state = trained()
    presence = Strangers(noise(state.outer.slow.phi) if phi == "noise" else None)
    before = everything(state)
    assert not join_late(state, presence, clock(), validation(state))  # type: ignore[arg-type]
    assert all(torch.equal(one, two) for one, two in zip(before, everything(state), strict=True))
    assert (state.counters.round, state.inner.step) == (9, 9 * H)
    assert presence.noted == [False]


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_a_liar_among_the_donors_does_not_keep_a_peer_from_the_others(liars: int) -> None:
    state = trained()
    phi = worse(state, validation(state), 1.1)
    presence, before = Strangers(phi), everything(state)
    presence.liars = [f"liar {number}" for number in range(liars)]
    taken = liars < 3  # else training goes on for a while
    assert join_late(state, presence, clock(), validation(state)) is taken  # type: ignore[arg-type]
    assert presence.asked == [*presence.liars, "b"][:3] and presence.noted == [taken]
    assert all(it is presence.rooms[0] for it in presence.rooms)  # one more would be twice the model again
    found = everything(state)
    assert torch.equal(found[1], phi if taken else before[1])


def test_who_says_that_it_is_further_must_not_be_worse() -> None:
    """A latecomer keeps what it has trained rather than take weights from before that."""
    for rounds, taken in ((1, False), (20, True)):
        state = trained()
        presence = Strangers(trained(rounds).outer.slow.phi, further=20)
        assert join_late(state, presence, clock(), validation(state)) is taken  # type: ignore[arg-type]
        assert state.counters.round == (27 if taken else 9)


@pytest.mark.parametrize(
    ("own", "theirs", "taken"),
    [
        (4.85, 9.7, False),  # a little better than a guess, and all that was trained would be lost
        (4.85, 5.8, True),
        (4.85, 5.83, False),
        (9.5, 9.7, True),
        (9.5, 9.9, False),
        (math.nan, 9.7, True),
    ],
)
def test_a_majority_is_not_believed_when_its_weights_are_much_worse(own: float, theirs: float, taken: bool) -> None:
    """Eight ids of one attacker made a member take weights that were hardly better than a guess (10 nats)."""
    state = trained(1)
    before = everything(state)
    judge: Any = SimpleNamespace(chance=10.0, loss_of=lambda phi: theirs, own_loss=lambda: own)
    presence = Strangers(noise(state.outer.slow.phi))
    assert join_late(state, presence, clock(), judge) is taken  # type: ignore[arg-type]
    assert all(torch.equal(one, two) for one, two in zip(before, everything(state), strict=True)) is not taken
    assert presence.noted == [taken]


def worse(state: PeerState, judge: Validation, ratio: float) -> Tensor:
    """Weights between those of ``state`` and earlier ones, with ``ratio`` times the loss."""
    early = trained(2).outer.slow.phi
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        phi = torch.lerp(state.outer.slow.phi, early, middle)
        low, high = (middle, high) if judge.loss_of(phi) < ratio * judge.own_loss() else (low, middle)
    assert 0.0 < low < high < 1.0
    return phi


def test_the_loss_of_those_who_are_further_must_be_lower() -> None:
    state = trained()
    judge = validation(state)
    presence = Strangers(worse(state, judge, 1.02), further=20)
    assert not join_late(state, presence, clock(), judge)  # type: ignore[arg-type]


def test_who_has_compared_itself_with_the_swarm_meets_it() -> None:
    """It declined all meetings for four rounds and more, because the swarm was further, though not better; a swarm that
    had begun with other weights (seed 4756) for ever.
    """
    state = trained()
    presence = Strangers(trained(1).outer.slow.phi, further=20)
    presence.origin.note(alone=True, taken=False, round=9, step=9 * H, root="a")
    assert presence.origin.late(9, 27, "a")
    assert not join_late(state, presence, clock(), validation(state))  # type: ignore[arg-type]
    assert not presence.origin.late(9, 27, "a")
    assert not presence.origin.late(9, 27, "b")  # the guard refuses weights that have nothing in common with its own


def test_who_gets_no_weights_to_compare_with_waits_for_them() -> None:
    state, presence = trained(), Strangers(None, further=20)
    presence.origin.note(alone=True, taken=False, round=9, step=9 * H, root="a")
    assert not join_late(state, presence, clock(), validation(state))  # type: ignore[arg-type]
    assert presence.origin.late(9, 27, "a")


def test_weights_are_tried_as_those_of_the_model() -> None:
    """In the middle of an inner phase as well, where θ is not φ."""
    state, other = trained(), trained(3)
    state.inner.run(state.stream.take(2))
    own, batches = theta(state), list(parts.stream(1).take(2))
    phi = other.outer.slow.phi
    other.outer.slow.write_fast()
    with state.trying(phi):
        torch.testing.assert_close(theta(state), phi)
        assert math.isclose(state.inner.evaluate(batches), other.inner.evaluate(batches), rel_tol=1e-5)
    torch.testing.assert_close(theta(state), own, rtol=0, atol=1e-7)


def test_who_has_nobody_to_take_from_takes_nothing() -> None:
    state, presence = trained(), Strangers(None)
    presence.ids = []
    assert not join_late(state, presence, clock(), validation(state))  # type: ignore[arg-type]
    assert not presence.noted
