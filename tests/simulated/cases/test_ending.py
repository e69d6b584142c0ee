"""The end of a run of pairs: some swaps without training bring the replicas together, and nobody is waited for long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from peer.rounds.pairing_rule import END_PATIENCE
from peer.swarm.pairing.proposals import ASK_TIMEOUT
from peer.training.boundaries.rollback import JUDGES
from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import World, in_a_folder

H, ROUNDS, STEP = 10, 8, 0.2  # seconds of an inner step
KINDS: tuple[Kind, ...] = ("blocking", "overlapped")
SEEDS = [0, *(pytest.param(it, marks=pytest.mark.long) for it in (1, 2))]


def ending(kind: Kind, speeds: Sequence[float], *faults: Fault) -> Scenario:
    machines = tuple(Machine(STEP / it, 0.01, up=1e7, down=1e7, skew=0.0, starts=0.0) for it in speeds)
    return Scenario(0, kind, machines, faults, 120.0, H, numel=2000, codec="int8", steps=H * ROUNDS)


def last_swaps(world: World, number: int) -> list[dict[str, Any]]:
    """The rounds of a peer without an inner step."""
    return [row for row in world.rounds(world.peers[number]) if row["train_loss"] is None]


def spread(world: World) -> float:
    """√(Σᵢ‖φᵢ − φ̄‖² / (N · numel)), of the checkpoints at the end."""
    weights = torch.stack([peer.disk.tensors["phi"] for peer in world.peers])
    return float((weights - weights.mean(0)).square().mean().sqrt())


def waited(world: World, number: int) -> float:
    """Seconds for partners and their tensors after the last inner step."""
    return sum(row["seconds"]["match"] + row["seconds"]["exchange"] for row in last_swaps(world, number))


@pytest.mark.parametrize("kind", KINDS)
def test_eight_peers_that_end_together_come_together(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_a_folder(ending(kind, [1.0] * 8)) as world:
        assert not world.run().violations
        close = spread(world)
        swaps = [last_swaps(world, number) for number in range(8)]
    merged = [[row["partner"] for row in rows if row["outcome"] == "merged"] for rows in swaps]
    assert all(len(partners) == len(set(partners)) <= 2 for partners in merged), "each is met once"
    assert sum(map(len, merged)) >= 14, merged
    monkeypatch.setattr("peer.training.boundaries.boundary.last_swaps", lambda members, merged: 0)
    with in_a_folder(ending(kind, [1.0] * 8)) as world:
        world.run()
        assert close < 0.6 * spread(world)  # 0.33 to 0.51 of it with eight seeds: pairs are drawn at random


@pytest.mark.parametrize("seed", SEEDS)
def test_who_judges_its_last_merge_is_not_late_for_the_next_one(seed: int) -> None:
    """Near the end each merge is judged by validation batches, here for 6 s. The partner waited for 2 s, and avoided it
    then: 12 of 180 rounds were alone.
    """
    machine = Machine(3.0, 0.01, up=1e7, down=1e7, skew=0.0, starts=0.0)
    scenario = Scenario(seed, "blocking", (machine,) * 6, (), 500.0, H, numel=2000, codec="int8", steps=3 * H)
    with in_a_folder(scenario) as world:
        assert not world.run().violations
        rows = [row for peer in world.peers for row in world.rounds(peer) if row["train_loss"] is not None]
    assert {row["outcome"] for row in rows} == {"merged"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_swap_follows_with_a_partner_whose_last_one_did_harm(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that waits for its swaps judges the last merge after it has met the next partner: the same one, of two."""
    monkeypatch.setattr("peer.training.boundaries.rollback.Rollback._taken_back", lambda *_: "it did harm")
    scenario = ending(kind, [1.0] * 2)
    with in_a_folder(scenario) as world:
        assert not world.run().violations
        rows = [[row["outcome"] for row in world.rounds(peer) if row["train_loss"] is not None] for peer in world.peers]
    for outcomes in rows:
        judged = outcomes[-(JUDGES // H) - 1 :]
        assert "merged" in outcomes[: -len(judged)] and "merged" not in judged, outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_ends_long_before_the_others_ends_at_once(kind: Kind) -> None:
    """The others still need 49 s. Their records may be 30 s old, so it waits for who may need less than 35 s."""
    with in_a_folder(ending(kind, [4.0, 0.3, 0.3])) as world:
        assert not world.run().violations
        assert not last_swaps(world, 0)
        assert all(last_swaps(world, number) for number in (1, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ends", "frozen"), [(3, 1), (2, 4)])
def test_who_ends_somewhat_later_is_waited_for_some_seconds_in_all(kind: Kind, ends: int, frozen: int) -> None:
    """The last ones freeze just before their end. Two that have met would wait twice for another one."""
    late = tuple(range(ends, ends + frozen))
    freeze = Fault(1.0 + STEP * H * (ROUNDS - 1), "freeze", late, 60.0, 0)
    with in_a_folder(ending(kind, [1.0] * (ends + frozen), freeze)) as world:
        assert not world.run().violations
        for number in range(ends):
            assert waited(world, number) < END_PATIENCE + ASK_TIMEOUT + 1.0
            assert len([row for row in last_swaps(world, number) if row["outcome"] != "merged"]) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [0.99, 0.97, 0.95])
def test_in_the_last_swaps_both_have_ended(kind: Kind, late: float) -> None:
    """The last one comes to its last boundary while two others wait for partners after theirs."""
    with in_a_folder(ending(kind, [1.0, 1.0, late])) as world:
        assert not world.run().violations
        for number, peer in enumerate(world.peers):
            others = {it.name: at for at, it in enumerate(world.peers)}
            for row in last_swaps(world, number):
                if row["outcome"] == "merged":
                    theirs = last_swaps(world, others[row["partner"]])
                    assert peer.name in [it["partner"] for it in theirs]


@pytest.mark.parametrize("seed", [2, *(pytest.param(it, marks=pytest.mark.long) for it in (0, 1))])
def test_who_was_met_at_the_last_boundary_is_not_met_again(seed: int) -> None:
    """Both have ended the moment their swap was done, and the others a second later."""
    machines = tuple(Machine(it, 0.03, up=1.25e5, down=6e5, skew=0.0, starts=0.0) for it in (0.2, 0.2, 0.205, 0.205))
    scenario = Scenario(seed, "overlapped", machines, (), 120.0, H, numel=20_000, codec="int8", steps=H * ROUNDS)
    with in_a_folder(scenario) as world:
        assert not world.run().violations
        for peer in world.peers:
            rows = world.rounds(peer)
            first = next(at for at, row in enumerate(rows) if row["train_loss"] is None)
            merged = [row for row in rows[first - 1 :] if row["outcome"] == "merged"]
            assert merged
            assert all(one["partner"] != two["partner"] for one, two in itertools.pairwise(merged))


@pytest.mark.parametrize("seed", [5, *(pytest.param(it, marks=pytest.mark.long) for it in (8, 13))])
def test_a_slow_member_makes_nobody_swap_more_or_wait_for_who_is_gone(seed: int) -> None:
    """It ends a minute after the four others, of which some make their last swap before the rest."""
    machines = tuple(Machine(it, 0.03, up=1.25e5, down=6e5, skew=0.0, starts=0.0) for it in (0.4, 0.4, 0.4, 0.4, 0.8))
    scenario = Scenario(seed, "overlapped", machines, (), 400.0, H, numel=20_000, codec="int8", steps=200)
    with in_a_folder(scenario) as world:
        assert not world.run().violations
        ends = [last_swaps(world, number) for number in range(5)]
    assert all(1 <= len(rows) <= 2 for rows in ends[:4]) and not ends[4]
    alone = [
        row["seconds"]["match"] + row["seconds"]["exchange"] for rows in ends for row in rows if not row["partner"]
    ]
    assert all(seconds < END_PATIENCE / 3 for seconds in alone)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_left_over_at_the_last_boundary_waits_until_the_others_have_made_that_swap(seed: int) -> None:
    """A swap takes 12 s, and each of the two judges it for 4 s. It gave up before (patience of 5 s; nobody agreed to
    meet it while it judged), and the two others swapped with each other again.
    """
    machine = Machine(2.0, 0.01, up=1.7e4, down=1.7e4, skew=0.0, starts=0.0)
    scenario = Scenario(seed, "overlapped", (machine,) * 3, (), 600.0, H, numel=200_000, codec="int8", steps=H * ROUNDS)
    with in_a_folder(scenario) as world:
        assert not world.run().violations
        for number, peer in enumerate(world.peers):
            merged = [row["partner"] for row in last_swaps(world, number) if row["outcome"] == "merged"]
            assert len(merged) == len(set(merged))
            boundary = next(row for row in reversed(world.rounds(peer)) if row["train_loss"] is not None)
            assert boundary["outcome"] == "merged" or merged
