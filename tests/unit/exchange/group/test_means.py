"""A false mean of a slice is found before anybody uses it, and who averaged it is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.config.schema import CodecName
from peer.exchange.group import sketch
from peer.exchange.group.all_reduce import AllReduceExchange, _Reduction
from peer.exchange.group.deadlines import RoundDeadlines
from peer.exchange.group.protocol import Decision
from peer.exchange.group.rounding import MOST_LOST, Rounding
from peer.exchange.group.shown import contradiction, digest_of, digest_table, held_apart, read_table, table
from peer.exchange.group.sketch import LOOSE, NOTHING_LOST, PROJECTIONS, Sketch, Sketches, factors
from peer.exchange.group.wire import GroupVerdict, MemberReport
from peer.rounds.contribution import Vector, norm
from peer.rounds.types import Assembly, Outcome
from tests.simulated.checks.ledger import group_mean
from tests.unit.exchange.group.harness import EXACT, many

LIAR = 2


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def rows_of(work: _Reduction) -> Tensor:
    """Norm and projections of each contribution to its slice, and of what was lost, in its table."""
    count = len(work._given)
    words = len(work._table) - (2 * count + 1) * (1 + PROJECTIONS)
    return work._table[words:].view(-1, 1 + PROJECTIONS)[: count + 1]


def shown(work: _Reduction) -> None:
    """Nothing is hidden."""


def own_row_fits(work: _Reduction) -> None:
    """Its own contribution is said to be what its mean would need."""
    rows, mean = rows_of(work)[:-1], work._sketches[LIAR]
    rest = rows[:, 1:].sum(0) - rows[LIAR, 1:]
    rows[LIAR, 1:] = len(rows) * torch.from_numpy(mean[1:]).float() - rest


def own_norm_fits(work: _Reduction) -> None:
    own_row_fits(work)
    own = rows_of(work)[LIAR]
    own[0] = own[1:].square().mean().sqrt()


def another_row_fits(work: _Reduction) -> None:
    """As :func:`own_row_fits`, of a contribution that it was given."""
    rows = rows_of(work)
    honest = rows[LIAR, 1:].clone()
    own_row_fits(work)
    rows[0, 1:] += rows[LIAR, 1:] - honest
    rows[LIAR, 1:] = honest


def rounding_fits(work: _Reduction) -> None:
    """It says that its mean was rounded so far."""
    rows, mean = rows_of(work), work._sketches[LIAR]
    rows[-1, 1:] = rows[:-1, 1:].mean(0) - torch.from_numpy(mean[1:]).float()
    rows[-1, 0] = rows[-1, 1:].square().mean().sqrt()


def no_numbers(work: _Reduction) -> None:
    rows_of(work)[LIAR] = math.nan


@pytest.mark.parametrize(
    ("hide", "why"),
    [
        (shown, "the mean from peer-c is not the mean"),
        (own_row_fits, "the contribution of peer-c to its own mean is longer"),
        (own_norm_fits, "the mean from peer-c is not the mean"),
        (another_row_fits, "(the mean from peer-c is not the mean|peer-c has averaged something else)"),
        (rounding_fits, "the mean from peer-c is rounded by more than its bits explain"),
        (no_numbers, "the sketches of peer-c are no numbers"),
    ],
)
@pytest.mark.parametrize("lie", [lambda mean: mean.neg_(), lambda mean: mean.add_(noise(len(mean), 9), alpha=3)])
@pytest.mark.parametrize("codec", ["none", "int8", "int4", "int2"])
def test_a_false_mean_is_used_by_nobody_and_its_author_is_named(
    monkeypatch: pytest.MonkeyPatch,
    hide: Callable[[_Reduction], None],
    why: str,
    lie: Callable[[Tensor], Tensor],
    codec: CodecName,
) -> None:
    average, sketched = _Reduction._average, _Reduction._sketch

    def false(work: _Reduction, *norms: list[float]) -> None:
        average(work, *norms)
        if work._me == LIAR:
            lie(work._mean)
            work._rounded = work._rounding.apply(work._mean)

    def hidden(work: _Reduction) -> None:
        sketched(work)
        if work._me == LIAR:
            hide(work)

    monkeypatch.setattr(_Reduction, "_average", false)
    monkeypatch.setattr(_Reduction, "_sketch", hidden)
    tensors = [noise(20_000, seed) + 0.5 * noise(20_000, 99) for seed in range(5)]
    with many(5, 20_000, settings=EXACT.model_copy(update={"codec": codec})) as group:
        results = group.average([Vector(it) for it in tensors])
    for tensor, it in zip(tensors, results, strict=True):
        assert (it.outcome, it.culprits[0]) == (Outcome.POISONED, "c"), it.detail
        assert torch.equal(it.mean, tensor)
    assert any(re.match(why, it.detail) for it in results), results


def test_a_leader_that_says_to_use_its_false_mean_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    average = _Reduction._average

    def false(work: _Reduction, *norms: list[float]) -> None:
        average(work, *norms)
        if work._me == 0:
            work._mean.neg_()

    async def believe_me(exchange: Any, work: Any, assembly: Assembly, deadlines: RoundDeadlines) -> Decision:
        for control in assembly.controls.values():
            await control.receive(MemberReport, deadlines.limit)
            await control.send(GroupVerdict(commit=True), 1)
        return GroupVerdict(commit=True), "digest"

    monkeypatch.setattr(_Reduction, "_average", false)
    monkeypatch.setattr(AllReduceExchange, "_lead", believe_me)
    with many(4, 5000) as group:
        results = group.average([Vector(noise(5000, seed) + noise(5000, 99)) for seed in range(4)])
    for it in results[1:]:
        assert (it.outcome, it.culprits) == (Outcome.POISONED, ("a",)), it.detail


def test_a_contribution_counts_as_far_as_usual_ones_are_long() -> None:
    tensors = [noise(5000, seed) for seed in range(5)]
    tensors[1] *= 8
    with many(5, 5000) as group:
        results = group.average([Vector(it) for it in tensors])
    for it in results:
        assert it.outcome is Outcome.MERGED, it.detail
        torch.testing.assert_close(it.mean, group_mean(tensors), rtol=1e-5, atol=1e-5)
    assert factors([1.0, 8.0, 1.0, 1.0, 1.0]) == [1.0, 1.5 / 8, 1.0, 1.0, 1.0]
    assert factors([1.0, 8.0]) == [1.0, 1.0]
    assert factors([0.0, 0.0, 8.0]) == [1.0, 1.0, 1.0]


@given(
    count=st.integers(2, 6),
    numel=st.sampled_from([0, 1, 2, 100, 4093, 4094, 300_001]),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
    longest=st.sampled_from([0.0, 1.0, 50.0]),
    tailed=st.booleans(),
    codec=st.sampled_from(list(MOST_LOST)),
    seed=st.integers(0, 10**6),
)
def test_an_honest_mean_is_never_objected_to(
    count: int, numel: int, scale: float, longest: float, tailed: bool, codec: CodecName, seed: int
) -> None:
    rounding = Rounding(codec)
    tensors = [noise(numel, seed + place) * scale for place in range(count)]
    tensors[0] *= longest
    for tensor in tensors:
        if tailed:  # few elements are much larger than all others
            tensor.mul_(noise(numel, seed + 99).abs_().pow_(4))
        rounding.apply(tensor)
    weights = factors([float(it.norm()) for it in tensors])
    mean = torch.zeros(numel)
    for tensor, weight in zip(tensors, weights, strict=True):
        mean.add_(tensor, alpha=weight)
    exact = mean.mul_(1 / count).clone()
    rounding.apply(mean)
    sketches, digests = Sketches("seed", numel), [digest_of(mean)] * count
    nothing = [NOTHING_LOST] * count, NOTHING_LOST
    given, shown = [sketches.of(Vector(it)) for it in tensors], sketches.of(Vector(mean))
    lost = sketches.of(Vector(exact - mean))
    for place in range(count):  # who averages this slice; the others are empty

        def at_place(sketch: Sketch, place: int = place) -> list[Sketch]:
            return [sketch if it == place else NOTHING_LOST for it in range(count)]

        tables = {
            it: read_table(table(digests, *((given, lost) if it == place else nothing), at_place(given[it])), count)
            for it in range(count)
        }
        for me in range(count):
            assert contradiction(tables, me, at_place(shown), rounding.most_lost) is None


@pytest.mark.parametrize("shape", ["dense", "one row", "one element", "rank one"])
def test_a_sketch_knows_the_length(shape: str) -> None:
    dense = noise(200_000, 1)
    vector = {
        "dense": dense,
        "one row": dense[:1000],
        "one element": torch.tensor([3.0]),
        "rank one": torch.outer(noise(400, 2), noise(500, 3)).flatten(),
    }[shape]
    found = []
    for seed in range(20):
        it = Sketches(str(seed), vector.numel()).of(Vector(vector))
        assert it[0] == pytest.approx(float(vector.norm()), rel=1e-5)
        found.append(float(np.sqrt(np.square(it[1:]).mean())) / it[0])
    assert 0.9 < sum(found) / len(found) < 1.1
    assert max(found) < LOOSE * 0.8


def test_a_length_is_the_same_on_every_machine() -> None:
    """Summed in fp32 it was off by the tolerance with which members compare it, by each BLAS in another way."""
    vector = torch.full((2**20,), 0.001234)
    exact = float(np.linalg.norm(vector.numpy().astype(np.float64)))
    assert norm(vector) == pytest.approx(exact, rel=1e-9)
    assert Sketches("seed", vector.numel()).of(Vector(vector))[0] == pytest.approx(exact, rel=1e-9)


def test_whoever_holds_something_else_is_suspected_with_who_sent_it() -> None:
    """A leader may give each member another mean, and say that all have the same."""
    mine = digest_table([digest_of(noise(10, seed)) for seed in range(4)])

    def other(sender: int) -> Tensor:
        return digest_table([digest_of(noise(10, seed + 9 * (seed == sender))) for seed in range(4)])

    assert held_apart(mine, mine.clone(), 2, 0) is None
    assert held_apart(mine, other(0), 2, 0) == ("{0} holds something else than was sent", 2, None)
    assert held_apart(mine, other(2), 2, 0) == ("{0} holds something else than was sent", 2, None)
    assert held_apart(mine, other(3), 2, 0) == ("{0} has sent something else to {1}, or {1} says so", 3, 2)


def test_the_signs_are_the_same_on_every_machine() -> None:
    signs = sketch._signs("seed", 3)
    assert signs.shape == (3, PROJECTIONS)
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert signs[0, :8].tolist() == [-1, 1, -1, -1, 1, 1, 1, 1]
