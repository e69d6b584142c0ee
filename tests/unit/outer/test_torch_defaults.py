"""A program with its own loop may set torch's default dtype and device: the outer step is in fp32 on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from peer.config.methods import DecoupledConfig, NoLoCoConfig
from peer.exchange.modulo import Modulo
from peer.outer.decoupled import Decoupled
from peer.outer.noloco import NoLoCo, PartOpening
from peer.outer.slow_weights import SlowWeights
from peer.rounds.contribution import Vector, host_vector, mean_of_senders
from tests.unit.exchange.group.harness import many

NUMEL = 1000


def trained() -> SlowWeights:
    """After some training."""
    draw = torch.Generator().manual_seed(0)
    weights = nn.Parameter(torch.randn(NUMEL, generator=draw, dtype=torch.float32, device="cpu"))
    slow = SlowWeights([("weights", weights)])
    with torch.no_grad():
        weights.add_(torch.randn(NUMEL, generator=draw, dtype=torch.float32, device="cpu"), alpha=1e-3)
    return slow


def opened() -> list[Tensor]:
    slow = trained()
    opening = PartOpening(NoLoCo(slow, NoLoCoConfig()), [(0, 400), (400, NUMEL)])
    found = list(opening.open(range(2), 1, wait=True))
    return [slow.phi, slow.spans[0].parameter.detach(), *(it for _, *both in found for it in both)]


def decoupled() -> list[Tensor]:
    method = Decoupled(trained(), DecoupledConfig(name="decoupled"))
    contribution = method.contribution()
    mean = host_vector(method.coefficients)
    mean_of_senders([contribution], mean)
    method.apply(mean)
    return [method.slow.phi, method.momentum]


def encoded() -> list[Tensor]:
    codec, own = Modulo("int8", NUMEL), trained().phi.clone()
    out = own.clone()
    codec.begin()
    codec.decode("int8", 0, bytearray(codec.encode(0, own)), own, out)
    return [out]


def grouped() -> list[Tensor]:
    with many(3, NUMEL) as group:
        found = group.average([Vector(trained().phi.clone()) for _ in range(3)])
    return [it.mean for it in found if it is not None]


@pytest.fixture(params=["dtype", "device"])
def other_defaults(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    def use() -> None:
        if request.param == "dtype":
            torch.set_default_dtype(torch.bfloat16)
        else:
            torch.set_default_device("meta")

    try:
        yield use
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("work", [opened, decoupled, encoded, grouped])
def test_torchs_defaults_change_nothing(work: Callable[[], list[Tensor]], other_defaults: Callable[[], None]) -> None:
    """With bfloat16 as the default dtype the outer step rounded by a fifth of what an inner phase had trained."""
    wanted = work()
    other_defaults()
    for found, right in zip(work(), wanted, strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, right)
