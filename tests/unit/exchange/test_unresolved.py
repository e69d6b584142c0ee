"""Blocks that int8 and int4 cannot resolve: they are counted and said, and a swap with many of them is not merged."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from peer.config.schema import CodecName
from peer.exchange.codec import BLOCK, size
from peer.exchange.guard import Guard
from peer.exchange.modulo import Modulo, codec_named
from peer.p2p.event_loop import LoopThread
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Link, Outcome, Reason
from tests.unit.exchange.pair_harness import at_once, judge, pair_exchange
from tests.unit.exchange.test_guard import Trained
from tests.unit.virtual import stream_pair

BLOCKS = 20
NUMEL = BLOCKS * BLOCK
MODULO: tuple[CodecName, ...] = ("int8", "int4")


class Two:
    """Two peers that swap again and again. ``phi``: their slow weights; each round both change by as much."""

    def __init__(self, thread: LoopThread, codec: CodecName) -> None:
        self._thread, self._chance = thread, torch.Generator().manual_seed(0)
        self.exchanges = [pair_exchange(thread, NUMEL, codec) for _ in range(2)]
        self.phi = [self.noise(0.05)] * 2
        self.resting = 0  # first blocks that do not change

    def noise(self, scale: float) -> Tensor:
        return scale * torch.randn(NUMEL, generator=self._chance)

    def peers(self, scale: float = 1.0) -> list[Trained]:
        changes = [scale * self.noise(1e-3).clamp(-2e-3, 2e-3) for _ in range(2)]
        for change in changes:
            change[: self.resting * BLOCK] = 0.0
        return [Trained(phi, change) for phi, change in zip(self.phi, changes, strict=True)]

    def swap(self, peers: list[Trained]) -> list[Averaged]:
        streams = self._thread.call(stream_pair(), 5)
        groups = [Group(0, (Link(name, name, it),)) for name, it in zip("BA", streams, strict=True)]
        return at_once(
            [partial(it.average, own, to) for it, own, to in zip(self.exchanges, peers, groups, strict=True)]
        )


@pytest.fixture(params=MODULO)
def two(thread: LoopThread, request: pytest.FixtureRequest) -> Two:
    two = Two(thread, request.param)
    for _ in range(4):
        assert all(it.outcome is Outcome.MERGED and not it.unresolved for it in two.swap(two.peers()))
    return two


def far(peer: Trained, blocks: int) -> Trained:
    """The first ``blocks`` of it are where no other peer is."""
    phi = peer.phi.clone()
    phi[: blocks * BLOCK] += torch.linspace(-0.1, 0.1, blocks * BLOCK)
    return Trained(phi, peer.change)


def test_a_block_that_does_not_resolve_is_counted_and_its_distance_is_not_taken_for_none(two: Two) -> None:
    one, other = two.peers()
    other = far(other, 2)
    swapped = two.swap([one, other])
    here = slice(2 * BLOCK, None)
    apart = (one.all() - other.all())[here].norm() / one.all()[here].norm()
    assert all(it.outcome is Outcome.MERGED and it.unresolved == 2 for it in swapped)
    assert "2 of 20 blocks could not be resolved" in swapped[0].detail
    assert torch.equal(swapped[0].mean[: 2 * BLOCK], one.all()[: 2 * BLOCK])
    assert swapped[0].distance == pytest.approx(float(apart), rel=0.03)  # 0.95 of it if the two counted as 0


def test_changes_that_grow_as_in_a_warm_up_are_resolved(two: Two) -> None:
    for scale in (2.0, 4.0, 6.0):
        assert not any(it.unresolved for it in two.swap(two.peers(scale)))


@pytest.mark.parametrize(("unresolved", "said"), [(0, ""), (10, ""), (11, "11 of 1000 blocks could not be resolved")])
def test_few_blocks_are_counted_and_not_said(unresolved: int, said: str) -> None:
    numel = 1000 * BLOCK
    own = Trained(torch.ones(numel), torch.full((numel,), 1e-3))
    judgement = Guard().judgement("B", numel)
    judgement.unresolved = unresolved
    verdict = judge(own, own.all(), judgement)
    assert (verdict.outcome, verdict.detail, judgement.unresolved) == (Outcome.MERGED, said, unresolved)


def test_a_swap_with_more_than_a_tenth_of_them_is_refused_and_the_peers_find_together_again(two: Two) -> None:
    one, other = two.peers()
    two.phi = [one.phi, far(other, 3).phi]
    peers = two.peers()
    for own, it in zip(peers, two.swap(peers), strict=True):
        assert it.outcome is Outcome.REFUSED and it.unresolved == 3 and not it.culprits
        assert "3 of 20 blocks could not be resolved" in it.detail
        assert torch.equal(it.mean, own.all())
    later = [two.swap(two.peers()) for _ in range(12)]  # their reach doubles in each
    assert all(it.outcome is Outcome.MERGED and not it.unresolved for both in later[-3:] for it in both)


@pytest.mark.parametrize("name", MODULO)
@pytest.mark.parametrize("false", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_step_that_no_peer_sends_is_refused_and_does_not_make_the_next_payload_larger(
    thread: LoopThread, name: CodecName, false: float
) -> None:
    """It was one more block that does not resolve: after many of them the victim sent fp16."""
    peers = Two(thread, name).peers()
    codec, other = Modulo("int8" if name == "int8" else "int4", NUMEL), codec_named(name, NUMEL)
    for it, peer in zip((codec, other), peers, strict=True):
        it.begin()
        it.learn(0, peer.change)
        it.end_round(True)
    data = torch.frombuffer(bytearray(other.encode(0, peers[1].all())), dtype=torch.uint8)
    data.view(BLOCKS, -1)[:, :2] = torch.tensor([false]).bfloat16().view(torch.uint8)
    codec.begin()
    before, theirs = codec._reach.clone(), torch.empty(NUMEL)
    judgement = Guard().judgement("B", NUMEL)
    judgement.unresolved += codec.decode(name, 0, bytearray(data.numpy().tobytes()), peers[0].all(), theirs)
    verdict = judge(peers[0], theirs, judgement)
    assert (verdict.outcome, verdict.reason) == (Outcome.POISONED, Reason.NOT_FINITE)
    codec.end_round(False, whole=judgement.whole)
    assert codec.sends == name and torch.equal(codec._reach, before)
    assert size(codec.sends, NUMEL) == size(name, NUMEL)


@pytest.mark.parametrize("name", MODULO)
def test_a_block_that_has_rested_and_jumps_is_resolved(thread: LoopThread, name: CodecName) -> None:
    """The embeddings of rare tokens: their reach has shrunk to almost nothing when they change again."""
    two = Two(thread, name)
    two.resting = 2
    for _ in range(20):
        two.swap(two.peers())
    one, other = two.peers()
    jumped = one.change.clone()
    jumped[: 2 * BLOCK] = torch.linspace(-2e-3, 2e-3, 2 * BLOCK)
    first, second = two.swap([Trained(one.phi, jumped), other])
    assert second.outcome is Outcome.MERGED and not second.unresolved  # who jumps says how far
    assert name == "int4" or not first.unresolved  # at rest 8 bits have room for it
