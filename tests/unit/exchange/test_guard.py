"""What a peer refuses of its partner, and what it must not refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from peer.exchange.codec import Cast
from peer.exchange.guard import RECENT_PARTNERS, Guard, judge
from peer.exchange.pair.blocking import PairExchange
from peer.p2p.event_loop import LoopThread
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Link, Outcome, Reason
from tests.swarm.support.attacks import Attack, Hostile
from tests.unit.exchange.pair_harness import FAST, at_once
from tests.unit.virtual import stream_pair

NUMEL = 20_000
GAMMA = 0.9


class Trained:
    """s = γφ + Δ, of given φ and Δ."""

    def __init__(self, phi: Tensor, change: Tensor) -> None:
        self.phi, self.change, self.numel = phi, change, len(phi)

    def read(self, start: int, out: Tensor) -> None:
        here = slice(start, start + len(out))
        torch.add(self.change[here], self.phi[here], alpha=GAMMA, out=out)

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        change.copy_(self.change[start : start + len(out)])

    def all(self) -> Tensor:
        out = torch.empty(self.numel)
        self.read(0, out)
        return out


class Swarm:
    """Peers that train the same: what they change is partly common, and they are a little apart."""

    def __init__(self) -> None:
        self.chance = torch.Generator().manual_seed(1)
        self.phi, self.way = self.noise(1.0), self.noise(0.05)

    def noise(self, size: float) -> Tensor:
        return size * torch.randn(NUMEL, generator=self.chance)

    def peer(self, apart: float = 0.03) -> Trained:
        return Trained(self.phi + self.noise(apart), self.way + self.noise(0.05))


class Both:
    """An honest peer's exchange, and that of a partner that sends by ``codec``."""

    def __init__(self, thread: LoopThread, codec: Cast) -> None:
        self._thread = thread
        self.victim = PairExchange(thread, NUMEL, Cast("none"), FAST, Guard())
        self.partner = PairExchange(thread, NUMEL, codec, FAST, Guard())

    def swap(self, own: Trained, theirs: Trained, peer_id: str = "B") -> Averaged:
        one, two = self._thread.call(stream_pair(), 5)
        ours, other = at_once(
            [
                partial(self.victim.average, own, Group(0, (Link(peer_id, "b", one),))),
                partial(self.partner.average, theirs, Group(0, (Link("A", "a", two),))),
            ]
        )
        assert other.outcome in (Outcome.MERGED, Outcome.REFUSED)
        return ours


REASONS = {
    Attack.SCALE: Reason.NORM,
    Attack.RANDOM: Reason.FAR,
    Attack.HUGE: Reason.NORM,
    Attack.NAN: Reason.NOT_FINITE,
}


@pytest.mark.parametrize("attack", REASONS)
def test_every_attack_is_refused_for_its_reason_at_the_first_meeting(thread: LoopThread, attack: Attack) -> None:
    swarm = Swarm()
    own = swarm.peer()
    averaged = Both(thread, Hostile(attack)).swap(own, swarm.peer())
    assert (averaged.outcome, averaged.reason, averaged.culprit) == (Outcome.POISONED, REASONS[attack], "B")
    assert torch.equal(averaged.mean, own.all())


class Louder(Cast):
    """The codec ``none`` of a peer that sends a multiple of its contribution."""

    def __init__(self, factor: float) -> None:
        super().__init__("none")
        self._factor = factor

    def encode(self, start: int, part: Tensor) -> bytes:
        return super().encode(start, self._factor * part)


@pytest.mark.parametrize(("factor", "refused"), [(0.47, True), (0.53, False), (1.9, False), (2.1, True)])
def test_norms_may_differ_by_a_factor_of_two(thread: LoopThread, factor: float, refused: bool) -> None:
    swarm = Swarm()
    own = swarm.peer()
    averaged = Both(thread, Louder(factor)).swap(own, own)
    expected = (Outcome.POISONED, Reason.NORM) if refused else (Outcome.MERGED, None)
    assert (averaged.outcome, averaged.reason) == expected, averaged.detail


@pytest.mark.parametrize(("factor", "refused"), [(1.9, False), (2.1, True)])
def test_one_with_nothing_in_common_may_change_twice_the_usual(
    thread: LoopThread, factor: float, refused: bool
) -> None:
    """Own, theirs and the own change are at right angles, so the lengths follow from Pythagoras."""
    third = NUMEL // 3

    def along(place: int, length: float) -> Tensor:
        out = torch.zeros(NUMEL)
        out[place * third : (place + 1) * third] = length / third**0.5
        return out

    change = along(2, (2 / (factor**2 - 1)) ** 0.5)  # of x² = 2 + change²
    own = Trained((along(0, 1.0) - change) / GAMMA, change)
    theirs = Trained(torch.zeros(NUMEL), along(1, 1.0))
    averaged = Both(thread, Cast("none")).swap(own, theirs)
    expected = (Outcome.POISONED, Reason.FAR) if refused else (Outcome.MERGED, None)
    assert (averaged.outcome, averaged.reason) == expected, averaged.detail


def test_what_was_merged_is_not_merged_again(thread: LoopThread) -> None:
    swarm = Swarm()
    both = Both(thread, Hostile(Attack.STALE))
    assert both.swap(swarm.peer(), swarm.peer()).outcome is Outcome.MERGED
    for _ in range(2):
        averaged = both.swap(swarm.peer(), swarm.peer())
        assert (averaged.outcome, averaged.reason) == (Outcome.POISONED, Reason.REPLAYED)
    assert both.swap(swarm.peer(), swarm.peer(), "C").outcome is Outcome.MERGED


def test_honest_peers_merge_round_after_round(thread: LoopThread) -> None:
    swarm, both = Swarm(), Both(thread, Cast("none"))
    for number in range(2 * RECENT_PARTNERS):
        averaged = both.swap(swarm.peer(), swarm.peer(), f"peer-{number % 7}")
        assert (averaged.outcome, averaged.reason) == (Outcome.MERGED, None), averaged.detail
        swarm.phi += swarm.way


def meet(guard: Guard, partner: str, own: Trained, theirs: Trained) -> Outcome:
    return judge(own, theirs.all(), guard, partner).outcome


def test_one_peer_far_away_stays_outside_however_often_it_comes() -> None:
    swarm, guard = Swarm(), Guard()
    for number in range(60):
        near = f"peer-{number % 4}"
        assert meet(guard, near, swarm.peer(), swarm.peer()) is Outcome.MERGED
        assert meet(guard, "far", swarm.peer(), swarm.peer(apart=3.0)) is Outcome.POISONED


def test_two_halves_that_have_become_unlike_come_together() -> None:
    ours, theirs, guard = Swarm(), Swarm(), Guard()
    theirs.phi = theirs.phi + ours.noise(0.8)
    for number in range(3):
        assert meet(guard, f"ours-{number}", ours.peer(), ours.peer()) is Outcome.MERGED
    assert meet(guard, "theirs", ours.peer(), theirs.peer()) is Outcome.MERGED


def test_a_newcomer_that_has_trained_nothing_yet_can_be_told_everything() -> None:
    swarm, guard = Swarm(), Guard()
    newcomer = Trained(swarm.phi.clone(), torch.zeros(NUMEL))
    assert meet(guard, "b", newcomer, swarm.peer()) is Outcome.MERGED
    assert meet(guard, "c", swarm.peer(), newcomer) is Outcome.MERGED


def test_what_is_remembered_is_bounded() -> None:
    swarm, guard = Swarm(), Guard()
    own = swarm.peer()
    for number in range(40):
        judge(own, swarm.peer().all(), guard, f"peer-{number}")
    assert len(guard._partners) == RECENT_PARTNERS


def test_too_long_a_change_is_noticed_before_all_of_it_is_there() -> None:
    """An overlapped swap uses parts before the last one has come."""
    swarm, guard = Swarm(), Guard()
    assert meet(guard, "b", swarm.peer(), swarm.peer()) is Outcome.MERGED
    own, theirs = swarm.peer(), 3 * swarm.peer().all()
    judgement, size = guard.judgement("c", NUMEL), NUMEL // 50
    for start in range(0, NUMEL, size):
        part, change = torch.empty(size), torch.empty(size)
        own.read_both(start, part, change)
        judgement.add(part, change, theirs[start : start + size])
        if judgement.objection(b"") is not None:
            break
    assert judgement.seen < 0.3 * NUMEL
