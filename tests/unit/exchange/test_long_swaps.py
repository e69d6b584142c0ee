"""Swaps that take minutes and hours, in virtual time: a large model over an ordinary line merges, whatever its size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from peer.config.schema import CodecName, ExchangeConfig
from peer.exchange.codec import size
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.exchange.pair.blocking import PairExchange
from peer.p2p.event_loop import LoopThread
from peer.rounds.contribution import PART, Averaged
from peer.rounds.types import Group, Link, Outcome
from tests.unit.exchange.pair_harness import at_once
from tests.unit.virtual import stream_pair, took

MBIT = 125_000  # bytes


class Drawn:
    """A contribution of any length without memory: elements that the place and the seed decide."""

    def __init__(self, numel: int, seed: int) -> None:
        self.numel, noise = numel, torch.Generator().manual_seed(seed)
        self._base = 0.05 * torch.randn(PART, generator=torch.Generator().manual_seed(0))
        self._change = 1e-3 * torch.randn(PART, generator=noise)

    def read(self, start: int, out: Tensor) -> None:
        torch.add(self._base[: out.numel()], self._change[: out.numel()], out=out)

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        change.copy_(self._change[: out.numel()])


class LastPart:
    """In the place of the buffer for the mean: keeps one part, so that a test needs no gigabytes."""

    def __init__(self) -> None:
        self._room = torch.empty(PART)

    def __getitem__(self, borders: slice) -> Tensor:
        return self._room[: borders.stop - borders.start]


def swap(
    thread: LoopThread,
    numel: int,
    mbit: float,
    phase_seconds: float,
    codec: CodecName = "none",
    away: Callable[[], bool] = lambda: False,
) -> list[Averaged]:
    """Both sides of a swap over a line of ``mbit`` each way. ``away``: was the first one asked to stop?"""
    streams = thread.call(stream_pair(rate=mbit * MBIT, latency=0.03), 5)
    stays = partial(bool, 0)
    sides = [
        PairExchange(
            network=thread, numel=1, codec=codec_named(codec, numel), settings=ExchangeConfig(), guard=Guard(), away=it
        )
        for it in (away, stays)
    ]
    for side in sides:
        side.numel, side._buffer = numel, LastPart()  # type: ignore[assignment]
    groups = [Group(5, (Link("B", "b", stream),), phase_seconds=phase_seconds) for stream in streams]
    works = [
        partial(side.average, Drawn(numel, n), group) for n, (side, group) in enumerate(zip(sides, groups, strict=True))
    ]
    return at_once(works, seconds=1e5)


def test_100_mb_over_5_mbit_merge(thread: LoopThread) -> None:
    for it in swap(thread, 25_000_000, mbit=5, phase_seconds=50):
        assert (it.outcome, it.seconds) == (Outcome.MERGED, took(160, more=1.0)), it.detail


@pytest.mark.parametrize(("codec", "seconds"), [pytest.param("none", 3085, marks=pytest.mark.long), ("int4", 398)])
def test_the_layout_of_the_6_8b_over_100_mbit_merges_in_a_hundredth(
    thread: LoopThread, codec: CodecName, seconds: float
) -> None:
    """9.64 B parameters with embeddings. Here a hundredth of these and of the line: as many seconds, 386 MB of fp32.

    An inner phase of 50 steps takes 20 minutes on an accelerator that makes 4e14 operations a second.
    """
    numel = 96_400_000
    assert size(codec, numel) / MBIT == pytest.approx(seconds, rel=0.01)
    for it in swap(thread, numel, mbit=1, phase_seconds=1200, codec=codec):
        assert (it.outcome, it.seconds) == (Outcome.MERGED, took(seconds, more=10.0)), it.detail


def test_who_is_asked_to_stop_ends_a_swap_that_takes_minutes(thread: LoopThread) -> None:
    """It was killed before it had saved: two minutes are given."""
    first, second = swap(thread, 25_000_000, mbit=5, phase_seconds=50, away=lambda: True)
    assert (first.outcome, first.detail, first.seconds) == (Outcome.TIMEOUT, "asked to stop", took(10, more=1.5))
    assert second.outcome is Outcome.TIMEOUT and second.seconds < 15
    assert not first.culprits and second.culprits  # nobody failed it; the other one was left


def test_a_line_on_which_it_is_not_worth_it_ends_it_at_a_quarter_and_says_so(thread: LoopThread) -> None:
    for it in swap(thread, 25_000_000, mbit=5, phase_seconds=10):
        assert (it.outcome, it.seconds) == (Outcome.TIMEOUT, took(10, more=0.5))
        assert "ing at 4.9" in it.detail and "(40 s are allowed)" in it.detail, it.detail
        assert "it would have taken 1" in it.detail, it.detail
