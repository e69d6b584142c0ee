"""Error feedback of the all-reduce: what rounding loses is sent later, whoever averages it and whatever round fails."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.exchange.group.feedback import mean_of_slices
from peer.exchange.group.rounding import Rounding, borders
from peer.rounds.contribution import PART, Vector
from peer.rounds.types import Outcome
from tests.unit.exchange.group_harness import EXACT, many

INT2 = EXACT.model_copy(update={"codec": "int2"})


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(
    numel=st.sampled_from([1, 255, 3000, PART + 300]),
    count=st.integers(2, 5),
    scales=st.lists(st.sampled_from([1e-3, 1.0, 30.0]), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_what_is_used_and_what_is_kept_add_up_to_what_was_contributed(
    numel: int, count: int, scales: list[float], seed: int
) -> None:
    kept = [torch.zeros(numel) for _ in range(count)]
    exact, used, mean = torch.zeros(numel), torch.zeros(numel), torch.empty(numel)
    for number, scale in enumerate(scales):
        tensors = [scale * noise(numel, seed + 10 * number + it) for it in range(count)]
        mean_of_slices([Vector(it) for it in tensors], Rounding("int2"), mean, kept)
        exact += torch.stack(tensors).mean(0)
        used += mean
    for place, (start, stop) in enumerate(borders(numel, count)):  # eᵢ of the mean, and of each contribution to it
        used[start:stop] += sum(it[start:stop] / (1 if me == place else count) for me, it in enumerate(kept))
    torch.testing.assert_close(used, exact, rtol=1e-4, atol=1e-4 * max(scales))


def test_what_is_kept_stays_bounded_so_that_the_mean_over_rounds_is_exact() -> None:
    numel, rounds, members = 3000, 200, 3
    tensors = [noise(numel, seed) + noise(numel, 9) for seed in range(members)]
    exact, sum_of_means = torch.stack(tensors).mean(0), torch.zeros(numel)
    kept, mean, sizes = [torch.zeros(numel) for _ in range(members)], torch.empty(numel), []
    for _ in range(rounds):
        mean_of_slices([Vector(it) for it in tensors], Rounding("int2"), mean, kept)
        sum_of_means += mean
        sizes.append(max(float(it.norm()) for it in kept))
    assert max(sizes[rounds // 2 :]) < 1.05 * max(sizes[: rounds // 2])
    assert float((sum_of_means / rounds - exact).norm() / exact.norm()) < 0.02
    without = torch.empty(numel)
    mean_of_slices([Vector(it) for it in tensors], Rounding("int2"), without)
    assert float((without - exact).norm() / exact.norm()) > 0.3


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("tailed", [False, True])
def test_who_has_kept_much_is_not_taken_for_a_liar(count: int, tailed: bool) -> None:
    """The last phase of a run may be one step: what is kept is then much longer than what is contributed."""
    numel = 20_000
    with many(count, numel, settings=INT2) as group:
        for scale in (1.0, 1.0, 0.01, 1e-4, 0.0, 1.0):
            tensors = [scale * noise(numel, seed) for seed in range(count)]
            if tailed:
                tensors = [it * noise(numel, 9).abs() ** 4 for it in tensors]
            for result in group.average([Vector(it) for it in tensors]):
                assert result is not None and result.outcome is Outcome.MERGED, (scale, result)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_real_members_keep_what_the_simulator_says_and_a_failed_round_changes_nothing(count: int) -> None:
    numel, mean = PART + 700, torch.empty(PART + 700)
    kept = [torch.zeros(numel) for _ in range(count)]
    with many(count, numel, settings=INT2) as group:
        for number in range(3):
            tensors = [noise(numel, 10 * number + seed) for seed in range(count)]
            contributions = [Vector(it) for it in tensors]
            before = [it.clone() for it in group.kept if it is not None]
            failed = group.average(contributions, silent=[count - 1])
            assert {it.outcome for it in failed if it} == {Outcome.TIMEOUT}
            assert all(torch.equal(one, two) for one, two in zip(before, group.kept, strict=True) if two is not None)
            mean_of_slices(contributions, Rounding("int2"), mean, kept)
            for result in group.average(contributions):
                assert result is not None and result.outcome is Outcome.MERGED, result
                assert torch.equal(result.mean, mean)
            for one, two in zip(group.kept, kept, strict=True):
                assert one is not None and torch.equal(one, two)
