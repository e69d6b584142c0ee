"""DiLoCo against torch's own SGD, decoupled momentum against its steps written out with scipy's DCT."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn, idctn
from torch import Tensor, nn

from peer.config.methods import DecoupledConfig, DiLoCoConfig, NoLoCoConfig
from peer.exchange.group.feedback import mean_of_slices
from peer.exchange.group.rounding import Rounding
from peer.outer.dct import basis, tilings
from peer.outer.decoupled import Decoupled
from peer.outer.diloco import DiLoCo
from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.rounds.contribution import mean_of_senders


class Weights(nn.Module):
    """A matrix whose sides are prime, a table as high as a byte-level vocabulary, and a vector."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        for index, shape in enumerate([(13, 7), (257, 96), (96,)]):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=noise)))


def fast(outer: OuterMethod) -> Tensor:
    out = torch.empty(outer.slow.numel)
    outer.slow.read_fast(0, out)
    return out


def train(outer: OuterMethod, seed: int) -> Tensor:
    """Inner steps: a random change of θ, which is returned."""
    change = torch.randn(outer.slow.numel, generator=torch.Generator().manual_seed(seed))
    outer.slow.add_to_fast(change)
    return change


def average_all(group: list[DiLoCo]) -> None:
    mean = torch.empty(group[0].slow.numel)
    mean_of_slices([outer.contribution() for outer in group], Rounding("none"), mean)
    for outer in group:
        outer.apply(mean)


@settings(max_examples=25)
@given(
    eta=st.floats(0.05, 1.5),
    mu=st.floats(0.0, 0.95),
    nesterov=st.booleans(),
    peers=st.integers(1, 4),
    rounds=st.integers(1, 4),
)
def test_diloco_is_torchs_sgd_on_the_mean_pseudo_gradient(
    eta: float, mu: float, nesterov: bool, peers: int, rounds: int
) -> None:
    hyper = DiLoCoConfig(name="diloco", learning_rate=eta, momentum=mu, nesterov=nesterov)
    group = [DiLoCo(SlowWeights(Weights(0).named_parameters()), hyper) for _ in range(peers)]
    reference = nn.Parameter(group[0].slow.phi.double())
    sgd = torch.optim.SGD([reference], lr=eta, momentum=mu, nesterov=nesterov and mu > 0)
    for number in range(rounds):
        before = reference.detach().clone()
        moved = [before + train(outer, 100 * number + place).double() for place, outer in enumerate(group)]
        reference.grad = before - torch.stack(moved).mean(0)
        sgd.step()
        average_all(group)
    for outer in group:
        torch.testing.assert_close(outer.slow.phi.double(), reference.detach(), rtol=1e-4, atol=1e-4)
        assert torch.equal(fast(outer), outer.slow.phi)
        assert torch.equal(outer.slow.phi, group[0].slow.phi), "equal replicas stay equal to the last bit"


@settings(max_examples=25)
@given(alpha=st.floats(0.0, 0.7), beta=st.floats(0.1, 1.2), rounds=st.integers(1, 5))
def test_two_noloco_peers_from_one_start_are_heavy_ball_diloco(alpha: float, beta: float, rounds: int) -> None:
    gamma = 0.5 * 2 * (1 - alpha**2)
    pair = [
        NoLoCo(SlowWeights(Weights(0).named_parameters()), NoLoCoConfig(alpha=alpha, beta=beta, gamma=gamma))
        for _ in range(2)
    ]
    reference = nn.Parameter(pair[0].slow.phi.double())
    sgd = torch.optim.SGD([reference], lr=beta, momentum=alpha)
    for number in range(rounds):
        before = reference.detach().clone()
        moved = [before + train(outer, 100 * number + place).double() for place, outer in enumerate(pair)]
        reference.grad = before - torch.stack(moved).mean(0)
        sgd.step()
        mean = torch.empty(pair[0].slow.numel)
        mean_of_slices([outer.contribution() for outer in pair], Rounding("none"), mean)
        for outer in pair:
            outer.apply(mean)
    for outer in pair:
        torch.testing.assert_close(outer.slow.phi.double(), reference.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", [1, 2, 7, 48, 64])
def test_the_transform_is_scipys_orthonormal_dct(side: int) -> None:
    signal = np.random.default_rng(side).normal(size=(side, side))
    ours = basis(side).double().numpy() @ signal @ basis(side).double().numpy().T
    np.testing.assert_allclose(ours, dctn(signal, norm="ortho"), atol=1e-4)


@pytest.mark.parametrize("chunk", [8, 64])
def test_every_parameter_comes_back_from_its_coefficients(chunk: int) -> None:
    slow = SlowWeights(Weights(1).named_parameters())
    tiles = tilings(slow, chunk, 1 / 128)
    assert tiles[0].start == 0
    for tiling, following in pairwise(tiles):
        assert tiling.stop == following.start
    for tiling in tiles:
        flat = slow.phi[tiling.span.start : tiling.span.stop]
        waves = tiling.forward(flat)
        torch.testing.assert_close(tiling.inverse(waves), flat, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(waves.norm(), flat.norm())  # orthonormal, and the padding is zero


def test_a_parameter_without_elements_has_no_coefficients() -> None:
    weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in ((4, 4), (0, 4), (0,), (4,))])
    assert [it.span.name for it in tilings(SlowWeights(weights.named_parameters()), 8, 0.5)] == ["0", "3"]


def test_a_large_axis_without_a_fitting_divisor_is_padded_and_not_cut_into_slivers() -> None:
    sizes = [(tiling.height, tiling.width) for tiling in tilings(SlowWeights(Weights(0).named_parameters()), 64, 0.01)]
    assert sizes == [(13, 7), (64, 48), (1, 48)]


def reference_step(
    theta: list[np.ndarray], phi: list[np.ndarray], delta: list[np.ndarray], keep: int, hyper: DecoupledConfig
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The steps for one 8 × 8 parameter in one chunk, in float64 with scipy; ``add``: those of the authors' code."""
    eta, mu = hyper.learning_rate, hyper.momentum
    peers = len(theta)
    change = [theta[i] - phi[i] for i in range(peers)]
    delta = [mu * delta[i] + change[i] for i in range(peers)]
    total, senders = np.zeros((8, 8)), np.zeros((8, 8))
    for i in range(peers):
        waves = dctn(delta[i], norm="ortho")
        chosen = np.zeros(64, dtype=bool)
        chosen[np.argsort(-np.abs(waves).ravel())[:keep]] = True
        sent = np.where(chosen.reshape(8, 8), waves.astype(np.float16).astype(np.float64), 0)
        if hyper.variant == "add":
            delta[i] = delta[i] - idctn(sent, norm="ortho")
        total, senders = total + sent, senders + chosen.reshape(8, 8)
    mean = total / np.maximum(senders, 1)
    if hyper.variant == "add":
        delta = [it + idctn(mean, norm="ortho") for it in delta]
    else:
        delta = [idctn(np.where(senders > 0, mean, dctn(it, norm="ortho")), norm="ortho") for it in delta]
    return [phi[i] + eta * (change[i] + mu * delta[i]) for i in range(peers)], delta


@pytest.mark.parametrize(("variant", "mu"), [("add", 0.5), ("replace", 0.9)])
def test_decoupled_is_the_papers_steps_with_the_residual_kept(variant: Literal["add", "replace"], mu: float) -> None:
    peers = 3
    hyper = DecoupledConfig(name="decoupled", momentum=mu, variant=variant, chunk=8, density=5 / 64)
    nets = [nn.Linear(8, 8, bias=False) for _ in range(peers)]
    group = [Decoupled(SlowWeights(net.named_parameters()), hyper) for net in nets]
    phi = [outer.slow.phi.double().numpy().reshape(8, 8).copy() for outer in group]
    delta = [np.zeros((8, 8))] * peers
    for number in range(4):
        for place, outer in enumerate(group):
            train(outer, 10 * number + place)
        theta = [fast(outer).double().numpy().reshape(8, 8) for outer in group]
        phi, delta = reference_step(theta, phi, delta, 5, hyper)
        mean = torch.empty(group[0].coefficients)
        mean_of_senders([outer.contribution() for outer in group], mean)
        for outer in group:
            outer.apply(mean)
        for place, outer in enumerate(group):
            np.testing.assert_allclose(outer.slow.phi.numpy().reshape(8, 8), phi[place], atol=2e-3)
            np.testing.assert_allclose(outer.momentum.numpy().reshape(8, 8), delta[place], atol=2e-3)


def fastest_growth(peers: int) -> tuple[float, np.ndarray]:
    """Of one coefficient in a round without decay, when its largest value alone is sent; and its values, sorted.

    Sorted again the values x₁ ≥ … ≥ xₙ become x₂ + x₁, …, xₙ + x₁, x₁.
    """
    step = np.eye(peers, k=1)
    step[:, 0] += 1
    growth, vectors = np.linalg.eig(step)
    return float(growth.real.max()), np.abs(vectors[:, growth.real.argmax()].real)


@pytest.mark.parametrize("peers", [2, 3, 4, 8, 16, 64])
def test_the_bound_on_the_momentum_is_that_of_the_fastest_growth(peers: int) -> None:
    growth, values = fastest_growth(peers)
    bound = 1 / growth
    assert sum(bound**power for power in range(1, peers + 1)) == pytest.approx(1)
    chance = np.random.default_rng(peers)
    state = np.ones(peers)
    for sent in (chance.random(peers) < chance.random() for _ in range(300)):  # who sends what grows no faster
        if sent.any():
            most = np.max(np.sort(state)[::-1] / values)
            mean = state[sent].mean()
            state = np.where(sent, mean, state + mean)
            assert np.max(np.sort(state)[::-1] / values) <= growth * most * (1 + 1e-9)
            state /= state.max()


@pytest.mark.parametrize(("variant", "grows"), [("add", True), ("replace", False)])
@pytest.mark.parametrize("peers", [8, 16])
def test_decoupled_momentum_grows_beyond_the_bound_where_it_is_added(
    peers: int, variant: Literal["add", "replace"], grows: bool
) -> None:
    """Each peer has another coefficient as its largest in every round; nothing is trained."""
    growth, values = fastest_growth(peers)
    for factor in (0.98, 1.02):
        hyper = DecoupledConfig(name="decoupled", variant=variant, momentum=factor / growth, density=1 / peers)
        group = [Decoupled(SlowWeights([("p", nn.Parameter(torch.zeros(peers)))]), hyper) for _ in range(peers)]
        for place, outer in enumerate(group):
            waves = torch.tensor(1000 * np.roll(values[::-1], place + 1), dtype=torch.float32)
            outer.momentum.copy_(basis(peers).T @ waves)
        norms = []
        for _ in range(30):
            mean = torch.empty(group[0].coefficients)
            mean_of_senders([outer.contribution() for outer in group], mean)
            for outer in group:
                outer.apply(mean)
                outer.slow.phi.zero_()
                outer.slow.write_fast()
            norms.append(max(float(outer.momentum.norm()) for outer in group))
        rate = (norms[-1] / norms[9]) ** (1 / 20)
        assert rate == pytest.approx(factor, abs=0.01) if grows else rate < 0.6, (factor, rate)


def test_decoupled_with_everything_shared_has_one_momentum() -> None:
    hyper = DecoupledConfig(name="decoupled", density=1.0)
    group = [Decoupled(SlowWeights(Weights(seed).named_parameters()), hyper) for seed in range(2)]
    for place, outer in enumerate(group):
        train(outer, place)
    mean = torch.empty(group[0].coefficients)
    mean_of_senders([outer.contribution() for outer in group], mean)
    for outer in group:
        outer.apply(mean)
    torch.testing.assert_close(group[0].momentum, group[1].momentum, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(group[0].slow.phi, group[1].slow.phi)


def test_a_contribution_is_small_and_asking_for_it_changes_nothing() -> None:
    outer = Decoupled(SlowWeights(Weights(0).named_parameters()), DecoupledConfig(name="decoupled"))
    train(outer, 0)
    before = fast(outer), outer.slow.phi.clone(), outer.momentum.clone()
    sparse = outer.contribution()
    assert sparse.values.numel() == outer.sends < 0.015 * outer.slow.numel
    assert len(set(sparse.positions.tolist())) == sparse.positions.numel()
    assert int((sparse.positions - sparse.bases).max()) < 2**16
    assert torch.equal(sparse.values, sparse.values.half().float())
    for kept, now in zip(before, (fast(outer), outer.slow.phi, outer.momentum), strict=True):
        assert torch.equal(kept, now)


def test_the_mean_of_senders_leaves_out_those_that_did_not_send() -> None:
    outer = Decoupled(SlowWeights(Weights(0).named_parameters()), DecoupledConfig(name="decoupled"))
    train(outer, 0)
    sparse = outer.contribution()
    mean = torch.full((outer.coefficients,), math.nan)
    mean_of_senders([sparse], mean)
    assert torch.equal(mean[sparse.positions], sparse.values)
    assert int(mean.count_nonzero()) <= sparse.values.numel()


def test_a_decoupled_member_that_misses_the_verdict_gives_its_change_once() -> None:
    """It steps as a group of one: δ is short of the group's by q̄ − q, which fades with μ, and no Δ is used again."""
    settings = DecoupledConfig(name="decoupled", density=1.0, momentum=0.5)
    group = [Decoupled(SlowWeights(Weights(0).named_parameters()), settings) for _ in range(3)]
    for seed, outer in enumerate(group):
        train(outer, seed)
    sent, mean = [outer.contribution() for outer in group], torch.empty(group[0].coefficients)
    mean_of_senders(sent, mean)
    own = torch.empty_like(mean)
    mean_of_senders([sent[2]], own)
    for outer, used in zip(group, (mean, mean, own), strict=True):
        outer.apply(used)
    coefficients = [own_coefficients(outer) for outer in group]
    torch.testing.assert_close(coefficients[2] - coefficients[0], 0.5 * (own - mean), rtol=0, atol=2e-2)


def own_coefficients(outer: Decoupled) -> Tensor:
    """What it sends without a further change, as a vector."""
    sent, out = outer.contribution(), torch.empty(outer.coefficients)
    mean_of_senders([sent], out)
    return out
