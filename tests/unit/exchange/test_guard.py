"""What a peer takes of its partner, what it clips, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from peer.exchange.codec import Cast
from peer.exchange.guard import RECENT_PARTNERS, Guard, Judgement, share
from peer.exchange.pair.blocking import PairExchange
from peer.p2p.event_loop import LoopThread
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Link, Outcome, Reason
from tests.swarm.support.attacks import Attack, Hostile
from tests.unit.exchange.pair_harness import FAST, at_once, judge
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
        self.victim, self.partner = (
            PairExchange(network=thread, numel=NUMEL, codec=it, settings=FAST, guard=Guard())
            for it in (Cast("none"), codec)
        )

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


@pytest.mark.parametrize(("attack", "reason"), [(Attack.RANDOM, Reason.FAR), (Attack.NAN, Reason.NOT_FINITE)])
def test_what_is_not_finite_or_has_nothing_in_common_is_refused_at_the_first_meeting(
    thread: LoopThread, attack: Attack, reason: Reason
) -> None:
    swarm = Swarm()
    own = swarm.peer()
    averaged = Both(thread, Hostile(attack)).swap(own, swarm.peer())
    assert (averaged.outcome, averaged.reason, averaged.culprits) == (Outcome.POISONED, reason, ("B",))
    assert torch.equal(averaged.mean, own.all())


BOUNDED = [it for it in Attack if it not in (Attack.NAN, Attack.RANDOM)]


@pytest.mark.parametrize("attack", BOUNDED)
def test_whatever_a_partner_sends_it_changes_no_more_than_the_own_inner_steps(
    thread: LoopThread, attack: Attack
) -> None:
    """At a first meeting; half of a distance of ``CLIP`` times βΔ."""
    swarm = Swarm()
    own = swarm.peer()
    averaged = Both(thread, Hostile(attack)).swap(own, swarm.peer())
    assert averaged.outcome is Outcome.MERGED, averaged.detail
    moved = float((averaged.mean - own.all()).norm())
    assert 0 < moved <= 1.0001 * float(own.change.norm())
    clipped = attack not in (Attack.SIGN, Attack.STALE)
    assert averaged.detail.startswith("clipped to") == clipped


@pytest.mark.parametrize("rounding", [0.0, 1e-8])
def test_a_newcomer_without_inner_steps_takes_nothing_of_a_false_contribution(
    thread: LoopThread, rounding: float
) -> None:
    """It has no change of its own by which to judge. Exactly 0 (β = γ) was an unbounded reach."""
    swarm = Swarm()
    own = Trained(swarm.phi, swarm.noise(rounding))
    averaged = Both(thread, Hostile(Attack.HUGE)).swap(own, swarm.peer())
    assert float((averaged.mean - own.all()).norm()) <= 2e-6 * float(own.all().norm())


def along(place: int, length: float) -> Tensor:
    """One of three directions at right angles."""
    third, out = NUMEL // 3, torch.zeros(NUMEL)
    out[place * third : (place + 1) * third] = length / third**0.5
    return out


def apart(distance: float, change: float = 1.0) -> tuple[Trained, Trained]:
    """Two peers whose contributions have a lot in common; ``change``: ‖βΔ‖ of both."""
    phi, trained = along(0, 100.0), along(1, change)
    return Trained(phi, trained), Trained(phi + along(2, distance / GAMMA), trained)


def taken(guard: Guard, distance: float, *, tokens: tuple[int, int] = (1, 1), partner: str = "B") -> float:
    """How far the mean is from the own contribution, at this distance of the partner's."""
    own, theirs = apart(distance)
    judgement, mean = guard.judgement(partner, NUMEL), theirs.all()
    judgement.share = share(*tokens)
    verdict = judge(own, mean, judgement)
    assert verdict.outcome is Outcome.MERGED
    assert (verdict.detail == "") == (judgement.least == 1)
    return float((mean - own.all()).norm())


@pytest.mark.parametrize(("distance", "moved"), [(0.5, 0.25), (1.95, 0.975), (2.05, 1.0), (50.0, 1.0)])
def test_a_partner_that_is_twice_as_far_as_usual_is_taken_in_full_and_no_further(distance: float, moved: float) -> None:
    assert taken(Guard(), distance) == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "distance", "moved"),
    [((1, 3), 3.0, 0.75), ((1, 3), 5.0, 1.0), ((3, 1), 1.0, 0.5), ((2**53, 1), 1.0, 0.5), ((2**53, 1), 9.0, 1.0)],
)
def test_no_number_of_tokens_gains_more_than_a_half(tokens: tuple[int, int], distance: float, moved: float) -> None:
    """And a partner with fewer tokens, which changes less, is taken in full from further away."""
    assert taken(Guard(), distance, tokens=tokens) == pytest.approx(moved, rel=1e-4)


def test_usual_is_the_median_of_the_recent_partners_in_units_of_the_own_change() -> None:
    guard = Guard()
    for number, distance in enumerate((3.0, 3.0, 3.0, 400.0, 500.0)):
        taken(guard, distance, partner=f"peer-{number}")
    assert taken(guard, 4.4) == pytest.approx(2.2, rel=1e-4)
    assert taken(guard, 4.6) == pytest.approx(2.25, rel=1e-4)
    own, theirs = apart(70.0, change=10.0)
    judge(own, theirs.all(), guard.judgement("D", NUMEL))  # from now on this peer changes ten times as much
    assert taken(guard, 70.0, partner="D") == pytest.approx(22.5, rel=1e-4)


@pytest.mark.parametrize("rounding", [0.0, 1e-5])
def test_after_the_last_inner_step_partners_are_taken_that_are_as_far_away_as_before_and_no_further(
    rounding: float,
) -> None:
    """There is no change of one's own then, and the last one was that of a short phase. In the first swap it may be
    what rounding has left: that was the unit by which the next partners were taken to a millionth.
    """
    guard = Guard()
    for number in range(5):
        taken(guard, 3.0, partner=f"P{number}")
    last = [(0.1, 3.0, 1.5), (rounding, 3.0, 1.5), *[(0.0, 3.0, 1.5)] * 5, (0.0, 90.0, 2.25)]
    for number, (change, distance, moved) in enumerate(last):
        own, theirs = apart(distance, change)
        mean = theirs.all()
        assert judge(own, mean, guard.judgement(f"P{number}", NUMEL)).outcome is Outcome.MERGED
        assert float((mean - own.all()).norm()) == pytest.approx(moved, rel=1e-3)


def test_whatever_all_partners_do_no_swap_changes_more_than_three_times_the_own_inner_steps() -> None:
    """Hostile peers that drive the others apart would otherwise be allowed more and more."""
    guard = Guard()
    moved = [taken(guard, 50.0 + number, partner=f"peer-{number}") for number in range(RECENT_PARTNERS)]
    assert moved[0] == pytest.approx(1.0, rel=1e-4)
    assert moved[-1] == pytest.approx(3.0, rel=1e-4) == max(moved)


def test_one_that_is_always_far_never_becomes_usual() -> None:
    guard = Guard()
    for number in range(2 * RECENT_PARTNERS):
        assert taken(guard, 50.0 + number, partner="far") == pytest.approx(1.0, rel=1e-4)
        assert taken(guard, 1 + number / 100, partner=f"near-{number % 2}") < 0.7


def test_one_that_was_alone_for_long_comes_back() -> None:
    """It takes more of the others as soon as most of its partners were far; they take little of it."""
    guards, places = [Guard() for _ in range(8)], [30.0, *[0.0] * 7]
    for number in range(21):
        other = 1 + number % 7
        ours, theirs = places[0], places[other]
        distance = abs(ours - theirs)
        way = 1 if theirs > ours else -1
        places[0] += way * taken(guards[0], distance + 1e-3, partner=f"peer-{other}")
        places[other] -= way * taken(guards[other], distance + 1e-3, partner="peer-0")
    assert max(places) - min(places) < 3.0
    assert max(places[1:]) < 10.0


@pytest.mark.parametrize(("factor", "refused"), [(1.95, False), (2.05, True)])
def test_one_with_nothing_in_common_may_be_twice_as_far_as_usual(
    thread: LoopThread, factor: float, refused: bool
) -> None:
    """Own, theirs and the own change are at right angles, so the distances follow from Pythagoras."""
    change = along(2, 2**0.5 / factor)
    own = Trained((along(0, 1.0) - change) / GAMMA, change)
    averaged = Both(thread, Cast("none")).swap(own, Trained(torch.zeros(NUMEL), along(1, 1.0)))
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
    return judge(own, theirs.all(), guard.judgement(partner, NUMEL)).outcome


def test_one_with_nothing_in_common_stays_outside_however_often_it_comes() -> None:
    swarm, guard = Swarm(), Guard()
    for number in range(60):
        near = f"peer-{number % 4}"
        assert meet(guard, near, swarm.peer(), swarm.peer()) is Outcome.MERGED
        assert meet(guard, "far", swarm.peer(), swarm.peer(apart=12.0)) is Outcome.POISONED


def test_a_newcomer_that_has_trained_nothing_yet_takes_much_after_its_first_inner_steps() -> None:
    swarm, guard = Swarm(), Guard()
    for change, clipped in ((torch.zeros(NUMEL), True), (swarm.way + swarm.noise(0.05), False)):
        newcomer = Trained(swarm.phi.clone(), change)
        judgement, mean = guard.judgement("peer", NUMEL), swarm.peer().all()
        assert judge(newcomer, mean, judgement).outcome is Outcome.MERGED
        assert (judgement.least < 1) == clipped


def test_what_is_remembered_is_bounded() -> None:
    swarm, guard = Swarm(), Guard()
    own = swarm.peer()
    for number in range(40):
        meet(guard, f"peer-{number}", own, swarm.peer())
    assert len(guard._partners) == RECENT_PARTNERS


def in_parts(guard: Guard, partner: str, own: Trained, theirs: Tensor, count: int) -> Iterator[tuple[Judgement, float]]:
    """The judgement after each of ``count`` parts, and the share of the partner in it."""
    judgement, size = guard.judgement(partner, NUMEL), NUMEL // count
    for start in range(0, NUMEL, size):
        part, change = torch.empty(size), torch.empty(size)
        own.read_both(start, part, change)
        yield judgement, judgement.add(start, part, change, theirs[start : start + size])


def test_one_with_nothing_in_common_is_noticed_before_all_of_it_is_there() -> None:
    """An overlapped swap uses parts before the last one has come."""
    swarm, guard = Swarm(), Guard()
    assert meet(guard, "b", swarm.peer(), swarm.peer()) is Outcome.MERGED
    for judgement, _ in in_parts(guard, "c", swarm.peer(), swarm.noise(1.0), 50):
        if judgement.objection(b"") is not None:
            break
    assert judgement.seen < 0.2 * NUMEL


def test_each_part_is_clipped_by_itself_and_so_is_the_whole() -> None:
    """A false part that is far off does not use up what is left for others, nor do these make room for it."""
    swarm, guard = Swarm(), Guard()
    for number in range(3):
        *_, (judgement, _) = in_parts(guard, f"peer-{number}", swarm.peer(), swarm.peer().all(), 50)
        assert judgement.verdict(bytes([number])).outcome is Outcome.MERGED
    own, theirs = swarm.peer(), swarm.peer().all()
    theirs[: NUMEL // 50] += 10.0
    shares = [share for _, share in in_parts(guard, "d", own, theirs, 50)]
    assert shares[0] < 0.02 and shares[1:] == [0.5] * 49


def test_a_swap_that_breaks_off_keeps_what_was_known_of_the_other_parts() -> None:
    swarm, guard = Swarm(), Guard()
    *_, (judgement, _) = in_parts(guard, "b", swarm.peer(), swarm.peer().all(), 50)
    guard.learn(judgement)
    _, before = guard._partners["b"]
    judgement, _ = next(in_parts(guard, "b", swarm.peer(), swarm.peer().all(), 50))
    guard.learn(judgement)
    _, after = guard._partners["b"]
    assert after.keys() == before.keys() and len(before) == 50 and after[0] != before[0]
    assert all(after[start] == before[start] for start in before if start)
    assert after[0] == pytest.approx(before[0], rel=0.5)
