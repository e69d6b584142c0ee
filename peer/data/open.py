"""The data of a run: training batches, read ahead where that takes time, and validation batches."""

from __future__ import annotations

import torch
from torch import Tensor

from peer.config.data import Streamed
from peer.config.schema import RunConfig
from peer.data import batches as data
from peer.data.corpus import Corpus
from peer.data.prefetch import Prefetched
from peer.data.sources.documents import Split
from peer.data.sources.stream import DocumentStream, Shape
from peer.data.tokenizer import Tokens


def batches(run: RunConfig, tokens: Tokens | Split, stream: int) -> data.BatchStream:
    """Data stream ``stream`` of the training split."""
    length = run.data.sequence_length
    if not isinstance(tokens, Split):
        return data.TokenStream(tokens, batch_size=run.batch_size, sequence_length=length, seed=run.seed, stream=stream)
    assert isinstance(run.data, Streamed)
    return DocumentStream(tokens, Shape(run.batch_size, length, run.data.shuffle), seed=run.seed, stream=stream)


def read_ahead(run: RunConfig, stream: data.BatchStream, device: torch.device) -> data.BatchStream:
    """``stream`` read ahead by a thread where it takes time: while one block is trained on, the next is read."""
    pin = device.type == "cuda"
    if isinstance(run.data, Streamed):
        return Prefetched(stream, pin=pin, depth=Shape(run.batch_size, 1, run.data.shuffle).batches)
    return Prefetched(stream, pin=pin) if pin else stream  # tokens in memory take microseconds


def validation(run: RunConfig, corpus: Corpus) -> list[Tensor]:
    """The run's validation batches; see :func:`peer.data.batches.validation_batches`."""
    return _validation(run, corpus.validation)


def evaluated(run: RunConfig, corpus: Corpus) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """The same, and those of ``run.evaluation.sets`` by name."""
    return validation(run, corpus), {name: _validation(run, tokens) for name, tokens in corpus.others.items()}


def _validation(run: RunConfig, tokens: Tokens) -> list[Tensor]:
    return data.validation_batches(
        tokens,
        batches=run.evaluation.batches,
        batch_size=run.batch_size,
        sequence_length=run.data.sequence_length,
    )
