"""Attention without a mask: the same results, no look at the accelerator, and flash kernels also when compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peer.config.model import LlamaModel
from peer.config.schema import RunConfig
from peer.device.accelerator import groups_in_16_bits_only
from peer.replica import attention
from peer.replica.attention import MASKLESS, WITHOUT_WINDOWS, without_mask
from peer.replica.inner_loop import token_loss
from peer.replica.model import build
from tests.unit import parts

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}  # of a value, on the host


def small(kind: str, **changes: Any) -> Any:
    """A model of transformers' class ``kind`` with random weights, as it comes from there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8} if kind not in ("gpt2", "gpt_neox", "opt") else {}
    more = {"vocab_size": 64, "max_position_embeddings": 64, "use_cache": False, **changes}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **more)).eval()


@pytest.mark.parametrize("kind", sorted(WITHOUT_WINDOWS))
def test_the_results_are_the_same(kind: str) -> None:
    model = small(kind, sliding_window=None)
    text = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))
    assert model.config._attn_implementation == "sdpa"
    before = model(input_ids=text).logits
    without_mask(model)
    assert model.config._attn_implementation == MASKLESS
    torch.testing.assert_close(model(input_ids=text).logits, before)
    assert MASKLESS not in model.config.to_json_string()  # an export is for programs that do not know it


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mistral", {"sliding_window": 8}), ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]})],
)
def test_a_window_stays(kind: str, changes: dict[str, Any]) -> None:
    model = small(kind, **changes)
    without_mask(model)
    assert model.config._attn_implementation == "sdpa"


class NoRead(TorchDispatchMode):
    """No operation reads a value of a tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in READS
        return function(*args, **(kwargs or {}))


def test_no_forward_pass_waits_for_the_accelerator() -> None:
    """Each micro-batch's did: transformers looked for packed sequences."""
    batch = parts.stream().batch(0)
    with NoRead():
        token_loss(parts.network(), batch, autocast=False).backward()


@pytest.mark.parametrize("heads", [2, 1])
def test_a_compiled_model_needs_no_mask_either(heads: int) -> None:
    """It had one of B T² elements, with which no flash kernel runs, and grouped keys were repeated."""
    calls: list[dict[str, Any]] = []

    def spy(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found = [it for it in graph.graph.nodes if it.target is nn.functional.scaled_dot_product_attention]
        calls.extend(dict(it.kwargs) for it in found)
        return graph.forward

    torch._dynamo.reset()
    settings = LlamaModel(hidden_size=16, intermediate_size=32, layers=1, heads=2, kv_heads=heads)
    model = build(RunConfig(model=settings))
    torch.compile(token_loss, backend=spy)(model, parts.stream().batch(0), False)
    assert calls and all(it["attn_mask"] is None and it["is_causal"] is True for it in calls)
    assert heads == 2 or all(it["enable_gqa"] for it in calls)


Heads = list[tuple[int, int, bool]]


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Heads:
    """What each attention is given: heads of the queries and of the keys, and whether these are said to be groups."""
    found: Heads = []
    attend = nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        assert key.shape == value.shape
        found.append((query.shape[1], key.shape[1], how.get("enable_gqa", False)))
        return attend(query, key, value, **how)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    return found


@pytest.mark.parametrize(
    ("dtype", "autocast", "given"),
    [
        (torch.float32, False, (4, 4, False)),
        (torch.float32, True, (4, 2, True)),
        (torch.bfloat16, False, (4, 2, True)),
    ],
    ids=["fp32", "autocast", "bf16"],
)
def test_in_fp32_grouped_heads_are_repeated_where_no_kernel_takes_them(
    dtype: torch.dtype, autocast: bool, given: tuple[int, int, bool], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NVIDIA GPU took the kernel that keeps T² scores of each head."""
    assert [kind for kind in ("cuda", "xpu", "mps", "cpu") if groups_in_16_bits_only(torch.device(kind))] == ["cuda"]
    monkeypatch.setattr(attention, "groups_in_16_bits_only", lambda device: True)
    model = small("llama", dtype=dtype)
    without_mask(model)
    token_loss(model, torch.zeros(2, 40, dtype=torch.int64), autocast)
    assert heads == [given] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_repeated_heads_change_no_result(compiled: bool, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama")
    without_mask(model)
    text = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))

    def gradients(loss: Any) -> list[Tensor]:
        model.zero_grad()
        loss(model, text, False).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    before = gradients(token_loss)
    monkeypatch.setattr(attention, "groups_in_16_bits_only", lambda device: True)
    torch._dynamo.reset()
    after = gradients(torch.compile(token_loss, backend="eager") if compiled else token_loss)
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other)
    assert set(heads[:2]) == {(4, 2, True)} and set(heads[2:]) == {(4, 4, False)}
