"""Causal attention without a mask, for models that see all earlier tokens.

Before each forward pass transformers looks whether the positions of a batch begin anew, as they do in packed sequences.
Ours never do. The look waits for the accelerator. Where the model is compiled it cannot look, so it builds a mask of
``[B, 1, T, T]``, with which no flash kernel runs and grouped keys and values are repeated. It builds none for an
attention function that it does not know (``masking_utils._preprocess_mask_arguments``), which is then causal by itself.

With grouped keys and values in fp32 an NVIDIA GPU would keep a matrix of ``[B, H, T, T]`` for the backward pass: its
kernel without one wants as many heads of keys and values as of queries. So they are repeated there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peer.device.accelerator import groups_in_16_bits_only

MASKLESS = "noloco_causal"
# With other masks than the causal one, or with biases, a model would compute something else without them
WITHOUT_WINDOWS = {"gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo", "olmo2", "opt", "qwen2", "qwen3"}

_UNGROUPED = nn.Module()  # an attention layer that says nothing of groups; it is causal


def without_mask(network: Any) -> None:
    """Let ``network`` (of transformers) attend without a mask where that changes no result."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    config = network.config
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type in WITHOUT_WINDOWS and config._attn_implementation == "sdpa" and not windows and not layers:
        AttentionInterface.register(MASKLESS, partial(_attend, sdpa_attention_forward))
        network.set_attn_implementation(MASKLESS)


def _attend(
    forward: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **how: Any
) -> Any:
    """``forward`` of transformers, with keys and values repeated where no kernel takes groups."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and not _takes_groups(query):
        module, key, value = _UNGROUPED, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return forward(module, query, key, value, *mask, **how)


def _takes_groups(query: Tensor) -> bool:
    if not groups_in_16_bits_only(query.device) or query.dtype != torch.float32:
        return True
    return torch.is_autocast_enabled(query.device.type)  # it rounds before torch chooses the kernel
