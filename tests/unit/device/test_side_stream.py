"""An overlapped outer step on an accelerator: nothing is used before its copy, and the host waits for none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import Fetched, SlowWeights
from tests.unit.late_device import LateDevice

PARTS = ((0, 11), (11, 37))  # their border lies within a parameter


def method(dtype: torch.dtype = torch.float32) -> NoLoCo:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(1, 2, bias=False)).to(dtype)
    return NoLoCo(SlowWeights(net.named_parameters()), NoLoCoConfig(alpha=0.3, beta=0.9, gamma=0.91))


def train(outer: NoLoCo, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for span in outer.slow.spans:
            span.parameter.add_(torch.randn(span.parameter.shape, generator=chance).to(span.parameter.dtype))


def fast(outer: NoLoCo) -> Tensor:
    return torch.cat([it.parameter.detach().float().reshape(-1) for it in outer.slow.spans])


@dataclass
class Opened:
    own: Tensor
    change: Tensor


def opened(outer: NoLoCo, fetched: Fetched) -> Opened:
    parts = torch.empty(fetched.stop - fetched.start), torch.empty(fetched.stop - fetched.start)
    outer.open(fetched, *parts)
    return Opened(*parts)


def correction(part: Opened) -> Tensor:
    return 0.1 * part.own - 0.2 * part.change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_come_late_take_the_same_step_and_keep_their_training(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, late = method(dtype), method(dtype)
    train(at_once, 1), train(late, 1)
    here = [opened(at_once, at_once.slow.fetch(*part)) for part in PARTS]
    train(at_once, 2)
    for (start, _), part in zip(PARTS, here, strict=True):
        at_once.amend(start, correction(part))

    with LateDevice(monkeypatch) as device:
        device.side_of(late.slow)
        coming = [late.slow.fetch(*part) for part in PARTS]
        train(late, 2)
        assert not any(it.arrived() for it in coming)
        device.complete()
        assert all(it.arrived() for it in coming)
        there = [opened(late, it) for it in coming]
        for (start, _), part in zip(PARTS, there, strict=True):
            late.amend(start, correction(part))

    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.own, other.own) and torch.equal(one.change, other.change)
    assert torch.equal(at_once.slow.phi, late.slow.phi) and torch.equal(at_once.momentum, late.momentum)
    torch.testing.assert_close(fast(late), fast(at_once), atol=1e-6 if dtype is torch.float32 else 0.04, rtol=0)
    down = ["down waits for compute", "download", "memory is kept"]
    assert device.calls == 2 * down + 4 * ["upload", "compute waits for up", "memory is kept"]


def test_a_step_without_training_since_leaves_the_slow_weights_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = method(torch.bfloat16)
    train(outer, 1)
    with LateDevice(monkeypatch) as device:
        device.side_of(outer.slow)
        for part in PARTS:
            fetched = outer.slow.fetch(*part)
            assert fetched.arrived(wait=True)
            opened(outer, fetched)
    assert device.calls.count("host waits") == 2
    assert torch.equal(fast(outer), outer.slow.phi.bfloat16().float())
