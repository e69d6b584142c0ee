"""The flat view of a model, and what an outer step holds on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.outer.method import Local
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from tests.unit import parts


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))


@pytest.mark.parametrize("size", [1, 4, 7, 40])
def test_parts_of_any_size_add_up_to_the_whole(size: int) -> None:
    outer = NoLoCo(SlowWeights(layers().named_parameters()), NoLoCoConfig(beta=0.6, gamma=0.9))
    with torch.no_grad():
        for span in outer.slow.spans:
            span.parameter.mul_(1.5)
    own = outer.contribution()
    whole = torch.empty(own.numel)
    own.read(0, whole)
    expected = 0.6 * 1.5 * outer.slow.phi + 0.3 * outer.slow.phi
    torch.testing.assert_close(whole, expected)
    for start in range(0, own.numel, size):
        part = torch.empty(min(size, own.numel - start))
        own.read(start, part)
        assert torch.equal(part, whole[start : start + size])


def test_writing_and_reading_are_inverse() -> None:
    net = layers()
    slow = SlowWeights(net.named_parameters())
    slow.phi.copy_(torch.arange(slow.numel))
    slow.write_fast()
    out = torch.empty(slow.numel)
    slow.read_fast(0, out)
    assert torch.equal(out, slow.phi)
    assert net[0].weight.flatten()[0] == 0


def test_bf16_weights_have_fp32_slow_weights() -> None:
    slow = SlowWeights(layers().to(torch.bfloat16).named_parameters())
    assert slow.phi.dtype == torch.float32
    slow.write_fast()
    assert slow.spans[0].parameter.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_move_as_far_as_their_slow_weights_do(dtype: torch.dtype) -> None:
    """A change that was rounded before it was added passed for training in a fifth of the weights."""
    network = layers().to(dtype)
    slow = SlowWeights(network.named_parameters())
    slow.phi.copy_(torch.randn(slow.numel, generator=torch.Generator().manual_seed(0)) * 0.02)
    slow.write_fast()
    slow.shift(torch.randn(slow.numel, generator=torch.Generator().manual_seed(1)) * 0.02)
    theta = torch.cat([it.detach().view(-1) for it in network.parameters()])
    assert torch.equal(theta, slow.phi.to(dtype))


def test_tied_parameters_count_once_and_frozen_ones_not() -> None:
    net = parts.network()
    names = [span.name for span in SlowWeights(net.named_parameters()).spans]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    frozen = layers()
    frozen[0].requires_grad_(False)
    assert SlowWeights(frozen.named_parameters()).numel == 10 + 10
    with pytest.raises(ValueError, match="no parameter"):
        SlowWeights([])


def test_the_layout_names_order_and_shapes() -> None:
    layout = SlowWeights(layers().named_parameters()).layout()
    assert layout.startswith("0.weight:5,3;0.bias:5;")
    assert layout != SlowWeights(nn.Sequential(nn.Linear(5, 3)).named_parameters()).layout()


def test_the_outer_step_keeps_two_vectors_on_the_host() -> None:
    outer = NoLoCo(SlowWeights(layers().named_parameters()), NoLoCoConfig())
    held = [value for owner in (outer, outer.slow) for value in vars(owner).values() if isinstance(value, Tensor)]
    assert {id(value) for value in held} == {id(outer.slow.phi), id(outer.momentum)}


def test_local_keeps_its_own_fast_weights() -> None:
    outer = Local(SlowWeights(layers().named_parameters()))
    with torch.no_grad():
        outer.slow.spans[0].parameter.add_(1.0)
    mean = torch.empty(outer.slow.numel)
    outer.contribution().read(0, mean)
    outer.apply(mean)
    assert torch.equal(outer.slow.phi, mean)
    assert torch.equal(outer.slow.spans[0].parameter.flatten(), mean[:15])
    assert outer.momentum is None
