"""A member that sends different data to different members: nobody uses it, and nobody else is blamed for certain."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from peer.config.schema import CodecName
from peer.exchange.group import all_gather, all_reduce
from peer.exchange.group.all_reduce import _Reduction
from peer.exchange.group.sketch import factors
from peer.exchange.group.streams import GroupStreams
from peer.rounds.contribution import Averaged, Readable, Vector
from peer.rounds.types import Outcome
from tests.unit.exchange.group.harness import EXACT, Many, many
from tests.unit.exchange.group.test_average import sparse
from tests.unit.exchange.group.test_means import noise, rows_of

NUMEL = 20_000
BETWEEN: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("between")  # sender and receiver


def named(group: Many, results: list[Averaged], liar: int) -> None:
    """All have refused the round. The liar is a suspect for each other member, alone or with one more."""
    name = group.members[liar].name
    for place, it in enumerate(results):
        assert it.outcome is Outcome.POISONED, it.detail
        assert place == liar or name in it.culprits, it.detail
        assert place == liar or it.culprits == (name,) or not it.certain, it.detail


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exchange with a member knows who sends to whom."""
    flow = GroupStreams.flow

    def known(streams: GroupStreams, place: int, left: int) -> Any:
        BETWEEN.set((streams.assembly.me, place))
        return flow(streams, place, left)

    monkeypatch.setattr(GroupStreams, "flow", known)


def fitting(work: _Reduction, receiver: int) -> torch.Tensor:
    """The table of a liar in which another member's contribution is what the false mean needs."""
    table = work._table.clone()
    rows = rows_of(work).clone()
    blamed = next(it for it in range(len(rows) - 1) if it not in (work._me, receiver))
    weights = np.array(factors(rows[:-1, 0].tolist()))
    contributions, lost = rows[:-1, 1:].double().numpy(), rows[-1, 1:].double().numpy()
    needed = len(weights) * (work._sketches[work._me][1:] + lost) - weights @ contributions
    rows[blamed, 1:] += torch.from_numpy(needed / weights[blamed]).float()
    start = len(table) - (2 * len(weights) + 1) * rows.shape[1]
    table[start : start + rows.numel()] = rows.flatten()
    return table


@pytest.mark.usefixtures("between")
@pytest.mark.parametrize(("count", "liar"), [(3, 2), (5, 2), (4, 0)])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_table_for_each_member_does_not_hide_a_false_mean(
    monkeypatch: pytest.MonkeyPatch, count: int, liar: int, codec: CodecName
) -> None:
    """Each table fitted for whoever read it, and all used any mean."""
    average, honest, works = _Reduction._average, all_reduce.fp32_parts, list[_Reduction]()

    def false(work: _Reduction, *norms: list[float]) -> None:
        average(work, *norms)
        if work._me == liar:
            works.append(work)
            work._mean.add_(noise(len(work._mean), 9), alpha=100.0)
            work._rounded = work._rounding.apply(work._mean)

    async def parts(vector: Readable) -> AsyncIterator[bytes]:
        sender, receiver = BETWEEN.get()
        if sender == liar and works and vector.numel == works[0]._table.numel():
            vector = Vector(fitting(works[0], receiver))
        async for data in honest(vector):
            yield data

    monkeypatch.setattr(_Reduction, "_average", false)
    monkeypatch.setattr(all_reduce, "fp32_parts", parts)
    with many(count, NUMEL, settings=EXACT.model_copy(update={"codec": codec})) as group:
        results = group.average([Vector(noise(NUMEL, seed) + 0.5 * noise(NUMEL, 99)) for seed in range(count)])
    named(group, results, liar)


@pytest.mark.usefixtures("between")
@pytest.mark.parametrize(("liar", "victim"), [(2, 3), (4, 1), (1, 0), (0, 2)])
def test_who_sends_one_member_another_mean_does_not_have_it_left_out(
    monkeypatch: pytest.MonkeyPatch, liar: int, victim: int
) -> None:
    """The victim was blamed by all, for certain, as its result was another one."""
    honest = all_reduce.fp32_parts

    async def parts(vector: Readable) -> AsyncIterator[bytes]:
        if BETWEEN.get() == (liar, victim) and vector.numel == NUMEL // 5:
            changed = torch.empty(vector.numel)
            vector.read(0, changed)
            changed[0] += 1
            vector = Vector(changed)
        async for data in honest(vector):
            yield data

    monkeypatch.setattr(all_reduce, "fp32_parts", parts)
    with many(5, NUMEL) as group:
        results = group.average([Vector(noise(NUMEL, seed) + 0.5 * noise(NUMEL, 99)) for seed in range(5)])
    named(group, results, liar)


@pytest.mark.usefixtures("between")
@pytest.mark.parametrize(("liar", "victim"), [(2, 3), (4, 0), (0, 1)])
def test_who_sends_one_member_another_sparse_contribution_is_a_suspect(
    monkeypatch: pytest.MonkeyPatch, liar: int, victim: int
) -> None:
    """All blamed the victim, each time."""
    honest, contributions = all_gather.fp32_parts, [sparse(seed) for seed in range(5)]

    async def parts(vector: Readable) -> AsyncIterator[bytes]:
        changed = torch.empty(vector.numel)
        vector.read(0, changed)
        if BETWEEN.get() == (liar, victim):
            changed.view(torch.int16)[1] = 0x3C00
        async for data in honest(Vector(changed)):
            yield data

    monkeypatch.setattr(all_gather, "fp32_parts", parts)
    with many(5, contributions[0].values.numel(), 600) as group:
        results = group.average(contributions)
    named(group, results, liar)
