"""Builds the model of a run. The only place that picks a model class."""

from __future__ import annotations

import torch
from torch import nn

from peer.config import LlamaModel
from peer.config_data import BYTE_VOCABULARY as VOCABULARY
from peer.errors import UserError


def build(settings: LlamaModel, *, sequence_length: int, seed: int, vocabulary: int = VOCABULARY) -> nn.Module:
    """Fresh fp32 weights on the CPU, equal on every machine for the same ``seed``.

    ``model(input_ids=[B, T]).logits`` is ``[B, T, vocabulary]``. The caller's random state is left alone.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads or settings.heads,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=settings.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def require_fit(network: nn.Module, tokenizer: str, vocabulary: int) -> None:
    """Raises :class:`UserError` when ``network`` does not know all ids that the tokenizer gives."""
    known = network.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if known < vocabulary:
        raise UserError(
            f"run.model: knows {known} tokens, run.data.tokenizer {tokenizer} has {vocabulary}; take the tokenizer "
            "that the model was made with, or a model with fresh weights"
        )


def parameter_count(model: nn.Module) -> int:
    """Trained parameters; tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def parameters_of(settings: LlamaModel, *, sequence_length: int, vocabulary: int = VOCABULARY) -> int:
    """:func:`parameter_count` of a model that is not made for it."""
    with torch.device("meta"):
        return parameter_count(build(settings, sequence_length=sequence_length, seed=0, vocabulary=vocabulary))
