"""One suite for every transport: in memory and virtual time, over sockets, over the real peer-to-peer network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from peer.p2p.bulk import offer
from peer.rounds.contribution import PART, Vector
from peer.rounds.types import Group, Outcome
from tests.unit.exchange.pair_harness import FAST, Pair, Transport, memory, network, sockets
from tests.unit.p2p.bulk.harness import patient

MakePair = Callable[..., Pair]
Opening = Callable[[], AbstractContextManager[Transport]]


@pytest.fixture(scope="module", params=["memory", "sockets", "network", "direct"])
def opening(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opening]:
    """The transport of each test. Two nodes are for all tests of theirs, and end before a test in virtual time begins.

    ``direct``: as ``network``, with direct connections for the parts.
    """
    if request.param in ("memory", "sockets"):
        yield memory if request.param == "memory" else sockets
        return
    with network(tmp_path_factory.mktemp("nodes"), "auto" if request.param == "direct" else "off") as transport:
        yield lambda: nullcontext(transport)


@pytest.fixture
def make(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    monkeypatch.setattr(offer, "LEAST_BULK", 0)
    patient(monkeypatch)
    with opening() as transport:
        yield transport.pair


def vectors(numel: int) -> tuple[Tensor, Tensor]:
    """Of two peers that go the same way, more or less."""
    chance = torch.Generator().manual_seed(numel)
    common, one, two = (torch.randn(numel, generator=chance) for _ in range(3))
    return common + 0.5 * one, common + 0.5 * two


@pytest.mark.parametrize("numel", [3, PART, 2 * PART + 5])
def test_both_get_the_same_bits_of_the_mean_and_nothing_else_changes(make: MakePair, numel: int) -> None:
    one, two = vectors(numel)
    kept = one.clone(), two.clone()
    left, right = make(numel).average(one, two)
    assert (left.outcome, right.outcome) == (Outcome.MERGED, Outcome.MERGED), (left.detail, right.detail)
    assert torch.equal(left.mean, right.mean)
    torch.testing.assert_close(left.mean, (one + two) / 2)
    assert torch.equal(one, kept[0]) and torch.equal(two, kept[1])
    assert left.distance == pytest.approx(float((one - two).norm() / one.norm()), rel=1e-4)
    assert left.bytes_sent >= 4 * numel and right.bytes_received >= 4 * numel
    assert left.partners == ("b",)
    assert (left.chosen, right.chosen) == (True, False)  # by the stream, which the proposer opens


def test_many_rounds_in_a_row(make: MakePair) -> None:
    one, two = vectors(1000)
    pair = make(1000)
    for _ in range(20):
        left, right = pair.average(one, two)
        assert left.outcome is right.outcome is Outcome.MERGED
        assert torch.equal(left.mean, right.mean)
        one, two = (left.mean + 0.1 * noise for noise in vectors(1000))


def test_alone_is_ones_own_contribution(make: MakePair) -> None:
    one, _ = vectors(10)
    averaged = make(10).exchanges[0].average(Vector(one), Group(3))
    assert averaged.outcome is Outcome.ALONE
    assert torch.equal(averaged.mean, one)
    assert averaged.bytes_sent == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e6])
def test_a_poisonous_contribution_is_used_by_nobody(make: MakePair, poison: float) -> None:
    good, bad = vectors(1000)
    bad[500] = poison * (1000 if poison == 1e6 else 1)
    left, right = make(1000).average(good, bad)
    assert left.outcome is Outcome.POISONED
    assert right.outcome in (Outcome.REFUSED, Outcome.POISONED)
    assert torch.equal(left.mean, good)
    torch.testing.assert_close(right.mean, bad, equal_nan=True)


def test_a_partner_that_does_not_come_is_a_timeout(make: MakePair) -> None:
    one, _ = vectors(1000)
    pair = make(1000, FAST)
    groups = pair.groups()  # the partner stands there and says nothing
    averaged = pair.exchanges[0].average(Vector(one), groups[0])
    assert averaged.outcome is Outcome.TIMEOUT
    assert averaged.seconds >= 0.99 * FAST.stall
    assert torch.equal(averaged.mean, one)
