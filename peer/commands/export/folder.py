"""Writes the Hugging Face folder: configuration, weights, tokenizer and model card. Whole, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer.commands.export import tokenizer
from peer.data.tokenizer import HuggingFace, Tokenizer
from peer.errors import RunError, UserError

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def require_free(out: Path) -> None:
    """Raise :class:`UserError` when ``out`` has something in it: nothing is overwritten."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already; choose another name, or move it away")


def write(network: Any, out: Path, *, dtype: str, card: str, words: Tokenizer) -> None:
    """``network`` (a transformers model) in ``dtype``, with the tokenizer ``words`` and ``card`` as its README.

    Written beside ``out`` and renamed. Raises :class:`RunError` when the disk does not take it.
    """
    temporary = out.absolute().with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _for_generation(network, words.end)
        network.to(EXPORT_DTYPES[dtype]).save_pretrained(temporary)
        if isinstance(words, HuggingFace):
            words.save(temporary)
        else:
            tokenizer.save(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        temporary.rename(out.absolute())
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None


def _for_generation(network: nn.Module, end: int) -> None:
    """A text ends where a document does, and generating keeps the keys and values that training throws away."""
    for settings in (network.config, network.generation_config):
        settings.use_cache = True  # type: ignore[union-attr]
        settings.eos_token_id = settings.pad_token_id = end  # type: ignore[union-attr]
