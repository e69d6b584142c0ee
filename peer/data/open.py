"""From the configuration to the data, and to batches: training batches, read ahead by a thread, and validation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from peer.config.data import Streamed
from peer.config.schema import RunConfig
from peer.data import batches as data
from peer.data import corpus
from peer.data.prefetch import Prefetched
from peer.data.sources.documents import Split
from peer.data.sources.stream import DocumentStream, Shape
from peer.data.tokenizer import Tokens
from peer.device.copies import has_streams


def corpus_of(run: RunConfig) -> corpus.Corpus:
    """The run's data, split as every peer splits it. Raises as :func:`peer.data.corpus.load`."""
    needed = run.evaluation.batches * run.batch_size * run.data.sequence_length + 1
    return corpus.load(run.data, run.evaluation.sets, needed)


def batches(run: RunConfig, tokens: Tokens | Split, stream: int) -> data.BatchStream:
    """Data stream ``stream`` of the training split."""
    length = run.data.sequence_length
    if not isinstance(tokens, Split):
        return data.TokenStream(tokens, batch_size=run.batch_size, sequence_length=length, seed=run.seed, stream=stream)
    assert isinstance(run.data, Streamed)
    return DocumentStream(tokens, Shape(run.batch_size, length, run.data.shuffle), seed=run.seed, stream=stream)


def read_ahead(
    run: RunConfig, stream: data.BatchStream, device: torch.device, away: Callable[[], bool] = lambda: False
) -> data.BatchStream:
    """``stream``, read ahead by a thread if reading takes time: training and reading overlap by one block. No batch is
    waited for once this peer is ``away``, or its network has failed.
    """
    pin = has_streams(device)
    if isinstance(stream, DocumentStream):
        return Prefetched(stream, pin=pin, depth=stream.shape.batches, passed=stream.passed, away=away)
    return Prefetched(stream, pin=pin, away=away) if pin else stream  # tokens in memory take microseconds


def validation(run: RunConfig, tokens: Tokens) -> list[Tensor]:
    """Windows at equal distances over a validation set: the same batches for every peer, each ``[B, T + 1]`` int64."""
    length, count = run.data.sequence_length, run.evaluation.batches * run.batch_size
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(np.int64)
    return list(data.windows_at(tokens, starts, length).split(run.batch_size))
