"""Causal attention without a mask, for models that see all earlier tokens.

Before each forward pass transformers looks whether the positions of a batch begin anew, as they do in packed sequences.
Ours never do. The look waits for the accelerator. Where the model is compiled it cannot look, so it builds a mask of
``[B, 1, T, T]``, with which no flash kernel runs and grouped keys and values are repeated. It builds none for an
attention function that it does not know (``masking_utils._preprocess_mask_arguments``), which is then causal by itself.
"""

from __future__ import annotations

from typing import Any

MASKLESS = "noloco_causal"
# With other masks than the causal one, or with biases, a model would compute something else without them
WITHOUT_WINDOWS = {"gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo", "olmo2", "opt", "qwen2", "qwen3"}


def without_mask(network: Any) -> None:
    """Let ``network`` (of transformers) attend without a mask where that changes no result."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    config = network.config
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type in WITHOUT_WINDOWS and config._attn_implementation == "sdpa" and not windows and not layers:
        AttentionInterface.register(MASKLESS, sdpa_attention_forward)
        network.set_attn_implementation(MASKLESS)
