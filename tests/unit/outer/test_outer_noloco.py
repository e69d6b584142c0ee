"""NoLoCo's one-tensor step against the two-tensor formula, and its invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights

SIZE = 12


def method(seed: int, hyper: NoLoCoConfig) -> NoLoCo:
    net = nn.Linear(3, 3)
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * seed + index)))
    return NoLoCo(SlowWeights(net.named_parameters()), hyper)


def fast(outer: NoLoCo) -> Tensor:
    out = torch.empty(SIZE)
    outer.slow.read_fast(0, out)
    return out


def train(outer: NoLoCo, delta: Tensor) -> None:
    """Inner steps that move θ by ``delta``."""
    with torch.no_grad():
        for span in outer.slow.spans:
            span.parameter.add_(delta[span.start : span.stop].view(span.parameter.shape))


def contribution(outer: NoLoCo) -> Tensor:
    out = torch.empty(SIZE)
    outer.contribution().read(0, out)
    return out


def swap(*group: NoLoCo) -> None:
    mean = torch.stack([contribution(outer) for outer in group]).mean(0)
    for outer in group:
        outer.apply(mean)


@st.composite
def hypers(draw: st.DrawFn) -> NoLoCoConfig:
    alpha = draw(st.floats(0, 0.9))
    gamma = draw(st.floats(0.05, 0.95)) * 2 * (1 - alpha**2)
    return NoLoCoConfig(alpha=alpha, beta=draw(st.floats(0.1, 1.5)), gamma=gamma)


@settings(max_examples=60)
@given(hyper=hypers(), seed=st.integers(0, 1000), rounds=st.integers(1, 4))
def test_it_equals_the_two_tensor_formula_in_float64(hyper: NoLoCoConfig, seed: int, rounds: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    peers = [method(0, hyper), method(1, hyper)]
    phi = [fast(peer).double() for peer in peers]
    momentum = [torch.zeros(SIZE, dtype=torch.float64) for _ in peers]
    for _ in range(rounds):
        deltas = [0.1 * torch.randn(SIZE, generator=noise) for _ in peers]
        for peer, delta in zip(peers, deltas, strict=True):
            train(peer, delta)
        swap(*peers)
        mean_phi, mean_delta = (phi[0] + phi[1]) / 2, (deltas[0] + deltas[1]).double() / 2
        for i in range(2):
            momentum[i] = hyper.alpha * momentum[i] + hyper.beta * mean_delta + hyper.gamma * (mean_phi - phi[i])
        phi = [p + m for p, m in zip(phi, momentum, strict=True)]
    for peer, expected in zip(peers, phi, strict=True):
        torch.testing.assert_close(peer.slow.phi.double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(hyper=hypers(), seed=st.integers(0, 1000))
def test_two_peers_from_one_start_are_diloco_with_heavy_ball(hyper: NoLoCoConfig, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    peers = [method(0, hyper), method(0, hyper)]
    start = fast(peers[0])
    reference = nn.Parameter(start.double())
    optimizer = torch.optim.SGD([reference], lr=hyper.beta, momentum=hyper.alpha)
    for _ in range(3):
        deltas = [0.1 * torch.randn(SIZE, generator=noise) for _ in peers]
        for peer, delta in zip(peers, deltas, strict=True):
            train(peer, delta)
        swap(*peers)
        reference.grad = -(deltas[0] + deltas[1]).double() / 2  # the pseudo-gradient
        optimizer.step()
    assert torch.equal(peers[0].slow.phi, peers[1].slow.phi)
    torch.testing.assert_close(peers[0].slow.phi.double(), reference.detach(), rtol=1e-4, atol=1e-5)


def test_the_swarms_mean_does_not_depend_on_gamma() -> None:
    means = []
    for gamma in (0.2, 0.7, 1.4):
        peers = [method(seed, NoLoCoConfig(gamma=gamma)) for seed in range(4)]
        noise = torch.Generator().manual_seed(7)
        for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))):
            for peer in peers:
                train(peer, 0.1 * torch.randn(SIZE, generator=noise))
            for a, b in pairs:
                swap(peers[a], peers[b])
        means.append(torch.stack([peer.slow.phi for peer in peers]).mean(0))
    torch.testing.assert_close(means[0], means[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(means[0], means[2], rtol=1e-4, atol=1e-5)


def test_alone_is_the_formula_with_one_peer() -> None:
    outer = method(0, NoLoCoConfig(alpha=0.5, beta=0.7, gamma=0.7))
    start, delta = fast(outer), torch.full((SIZE,), 0.1)
    train(outer, delta)
    swap(outer)
    torch.testing.assert_close(outer.slow.phi, start + 0.7 * delta)
    swap(outer)  # no inner steps: only the momentum moves it
    torch.testing.assert_close(outer.slow.phi, start + 0.7 * delta + 0.35 * delta)


def test_after_the_step_the_fast_weights_are_the_slow_ones_and_the_mean_is_unchanged() -> None:
    outer = method(0, NoLoCoConfig())
    train(outer, torch.ones(SIZE))
    mean = contribution(outer)
    kept = mean.clone()
    outer.apply(mean)
    assert torch.equal(fast(outer), outer.slow.phi)
    assert torch.equal(mean, kept)


def test_two_peers_without_inner_steps_converge() -> None:
    peers = [method(0, NoLoCoConfig()), method(1, NoLoCoConfig())]
    middle = (peers[0].slow.phi + peers[1].slow.phi) / 2
    for _ in range(40):
        swap(*peers)
    torch.testing.assert_close(peers[0].slow.phi, middle, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(peers[1].slow.phi, middle, rtol=1e-4, atol=1e-5)


@settings(max_examples=60)
@given(hyper=hypers(), seed=st.integers(0, 1000), border=st.integers(1, SIZE - 1))
def test_parts_opened_alone_and_amended_later_are_the_step_of_a_group_of_two(
    hyper: NoLoCoConfig, seed: int, border: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    waited, rolled, partner = (method(it, hyper) for it in (seed, seed, seed + 1))
    for outer in (waited, rolled, partner):
        outer.momentum.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed + 7)))
    delta, meanwhile = (torch.randn(SIZE, generator=noise) for _ in range(2))
    for outer in (waited, rolled):
        train(outer, delta)
    train(partner, 0.5 * delta)
    theirs = contribution(partner)
    waited.apply((contribution(waited) + theirs) / 2)
    train(waited, meanwhile)

    corrections = []
    for start, stop in ((0, border), (border, SIZE)):
        own = torch.empty(stop - start)
        rolled.open(rolled.slow.fetch(start, stop), own, torch.empty_like(own))
        corrections.append((start, (theirs[start:stop] - own) / 2))
    train(rolled, meanwhile)  # inner steps between a part's opening and the arrival of the partner's
    for start, correction in corrections:
        rolled.amend(start, correction)
    for one, other in (
        (waited.momentum, rolled.momentum),
        (waited.slow.phi, rolled.slow.phi),
        (fast(waited), fast(rolled)),
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_correction_that_is_less_than_the_step_of_16_bits_is_not_taken_for_training(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(0)
    weights = 0.05 * torch.randn(100_000, generator=chance)
    outer = NoLoCo(SlowWeights([("weights", nn.Parameter(weights.to(dtype)))]), NoLoCoConfig())
    outer.slow.phi.copy_(weights)
    outer.slow.spans[0].parameter.data.add_(0.001 * torch.randn(100_000, generator=chance))
    correction = torch.full((100_000,), 1e-5 if dtype is torch.float16 else 1e-4)

    def trained() -> Tensor:
        theta = torch.empty(100_000)
        outer.slow.read_fast(0, theta)
        return theta - outer.slow.phi

    before = trained()
    for _ in range(10):
        outer.amend(0, correction)
    undone = -(trained() - before) / (10 * correction)
    assert abs(undone.mean()) < 0.02  # 0.44 to 0.47 when each is rounded by itself
    torch.testing.assert_close(outer.slow.phi, weights + 10 * correction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_after_the_run_a_contribution_is_the_slow_weights_and_its_change_exactly_nothing(dtype: torch.dtype) -> None:
    """What rounding leaves between θ and φ is no training. It was the unit by which a guard clipped all partners."""
    chance = torch.Generator().manual_seed(0)
    outer = NoLoCo(SlowWeights([("weights", nn.Parameter(torch.zeros(SIZE, dtype=dtype)))]), NoLoCoConfig())
    outer.momentum.copy_(torch.randn(SIZE, generator=chance))
    outer.slow.phi.copy_(torch.randn(SIZE, generator=chance))
    outer.slow.write_fast()
    outer.slow.spans[0].parameter.data.mul_(1.01)
    outer.end_run()
    phi, own, change = outer.slow.phi.clone(), torch.empty(SIZE), torch.empty(SIZE)
    outer.contribution().read_both(0, own, change)
    assert torch.equal(own, phi) and torch.equal(change, torch.zeros(SIZE))
    mean = phi + torch.randn(SIZE, generator=chance)
    assert outer.open(outer.slow.fetch(0, SIZE), own, change)
    outer.amend(0, mean - own)
    torch.testing.assert_close(outer.slow.phi, mean)
    torch.testing.assert_close(fast(outer), outer.slow.phi, rtol=2 * torch.finfo(dtype).eps, atol=0)
    blocking = NoLoCo(outer.slow, NoLoCoConfig())
    blocking.end_run()
    blocking.apply(phi)
    torch.testing.assert_close(outer.slow.phi, phi)
    assert torch.equal(outer.slow.spans[0].parameter, outer.slow.phi.to(dtype))
