"""The mean of a pair is weighted by tokens, and no header gives a partner more than a half."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.contribution import PART, Averaged, Vector
from peer.rounds.types import Outcome
from tests.unit.exchange.pair_harness import at_once, pair_exchange
from tests.unit.exchange.test_pair_overlapped import NUMEL, Trainee, both, with_link
from tests.unit.virtual import stream_pair

# tokens of the two, and the share of each one in the other's mean
WEIGHTS = [
    (300, 100, 0.5, 0.25),
    (100, 300, 0.25, 0.5),
    (7, 7, 0.5, 0.5),
    (0, 0, 0.5, 0.5),
    (2**53, 1, 0.5, 0.1),
    (0, 5, 0.1, 0.5),
    (95, 5, 0.5, 0.1),
]


def near(numel: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(numel)
    common, one, two = (torch.randn(numel, generator=drawn) for _ in range(3))
    return common + 0.5 * one, common + 0.5 * two


def means(vectors: tuple[Tensor, Tensor], of_first: float, of_second: float) -> tuple[Tensor, Tensor]:
    one, two = vectors
    return one + of_second * (two - one), two + of_first * (one - two)


@pytest.mark.parametrize(("first", "second", "of_first", "of_second"), WEIGHTS)
def test_a_blocking_swap_weights_both_by_their_tokens(
    thread: LoopThread, first: int, second: int, of_first: float, of_second: float
) -> None:
    vectors, numel = near(PART + 7), PART + 7

    def average(vector: Tensor, stream: Stream, tokens: int) -> Averaged:
        return pair_exchange(thread, numel).average(Vector(vector), with_link(stream, tokens)())

    sides = zip(vectors, thread.call(stream_pair(), 5), (first, second), strict=True)
    results = at_once(partial(average, *side) for side in sides)
    for averaged, expected in zip(results, means(vectors, of_first, of_second), strict=True):
        assert averaged.outcome is Outcome.MERGED, averaged.detail
        torch.testing.assert_close(averaged.mean, expected)


@pytest.mark.parametrize(("first", "second", "of_first", "of_second"), WEIGHTS)
def test_an_overlapped_swap_weights_both_by_their_tokens(
    thread: LoopThread, first: int, second: int, of_first: float, of_second: float
) -> None:
    vectors = near(NUMEL)
    one, two = (Trainee(thread, vector.clone()) for vector in vectors)
    for averaged in both(one, two, thread.call(stream_pair(), 5), (first, second)):
        assert averaged.outcome is Outcome.MERGED, averaged.detail
    for it, expected in zip((one, two), means(vectors, of_first, of_second), strict=True):
        torch.testing.assert_close(it.vector, expected)


@pytest.mark.parametrize(("first", "second", "of_first", "of_second"), WEIGHTS)
def test_the_mean_of_the_slow_weights_moves_to_the_faster_peer_and_is_kept_at_equal_tokens(
    thread: LoopThread, first: int, second: int, of_first: float, of_second: float
) -> None:
    """φ and Δ cross as one tensor, so the tokens weight both."""
    trained = 1.0
    methods = [NoLoCo(SlowWeights([("weights", nn.Parameter(it))]), NoLoCoConfig()) for it in near(NUMEL)]
    before = [it.slow.phi.clone() for it in methods]
    for it in methods:
        it.slow.add_to_fast(torch.full((NUMEL,), trained))

    def step(method: NoLoCo, stream: Stream, tokens: int) -> None:
        averaged = pair_exchange(thread, NUMEL).average(method.contribution(), with_link(stream, tokens)())
        assert averaged.outcome is Outcome.MERGED and not averaged.detail
        method.apply(averaged.mean)

    sides = zip(methods, thread.call(stream_pair(), 5), (first, second), strict=True)
    at_once(partial(step, *side) for side in sides)
    moved = sum(it.slow.phi - was for it, was in zip(methods, before, strict=True)) / 2
    drift = NoLoCoConfig().gamma * (of_first - of_second) / 2 * (before[0] - before[1])
    torch.testing.assert_close(moved, trained + drift, atol=1e-5, rtol=1e-4)
