"""Attention without a mask: the same results, no look at the accelerator, and flash kernels also when compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peer.config.model import LlamaModel
from peer.config.schema import RunConfig
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
