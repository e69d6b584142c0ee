"""Batches as a pure function of (seed, stream, position). A resume needs one integer. Peers read different data, and no
peer needs to know the number of peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.data.tokenizer import Tokens

Cursor = dict[str, Any]  # JSON values


class BatchStream(Protocol):
    """An endless stream of training batches. ``position``: the number of batches taken."""

    position: int

    @property
    def cursor(self) -> Cursor | None:
        """What a resume needs besides ``position``; ``None``: nothing."""

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """Set ``position``. The next batch is the one after the first ``position`` batches."""

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` batches, ``[B, T + 1]`` int64 token ids. Each one counts once it is yielded."""

    def close(self) -> None:
        """Close files and end threads."""


class TokenStream:
    """A :class:`BatchStream` of tokens in memory."""

    cursor = None

    def __init__(self, tokens: Tokens, *, batch_size: int, sequence_length: int, seed: int, stream: int) -> None:
        self._tokens, self._batch_size, self._length = tokens, batch_size, sequence_length
        self._seed, self._stream, self.position = seed, stream, 0

    def batch(self, position: int) -> Tensor:
        """Batch number ``position``: ``[batch_size, sequence_length + 1]`` int64 token ids.

        The windows start at uniformly random tokens. The generator is counter-based, so there is no state to save.
        """
        seed = np.random.SeedSequence([self._seed, self._stream, position])
        last = len(self._tokens) - self._length - 1
        starts = np.random.Generator(np.random.Philox(seed)).integers(0, last + 1, self._batch_size)
        return windows_at(self._tokens, starts, self._length)

    def resume(self, position: int, cursor: Cursor | None) -> None:
        self.position = position

    def take(self, count: int) -> Iterator[Tensor]:
        for _ in range(count):
            batch = self.batch(self.position)
            self.position += 1
            yield batch

    def close(self) -> None:
        """No file is open."""


def windows_at(tokens: Tokens, starts: NDArray[np.int64], length: int) -> Tensor:
    """The windows of ``length + 1`` tokens from each of ``starts`` on: ``[len(starts), length + 1]`` int64."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)[None, :]].astype(np.int64))
