"""Batches as a pure function of (seed, stream, position): resuming is an integer, and peers read different data
without knowing how many they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.data.tokenizer import Tokens

Cursor = dict[str, Any]  # what JSON holds


class BatchStream(Protocol):
    """Training batches without end; ``position`` of them have been taken."""

    position: int

    @property
    def cursor(self) -> Cursor | None:
        """What a resume needs besides the position; ``None``: nothing."""

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """Go on after batch number ``position``."""

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` batches, ``[B, T + 1]`` int64 token ids. One counts as taken when it is handed out."""

    def close(self) -> None:
        """Let go of files and threads."""


class TokenStream:
    """The stream of tokens that are in memory."""

    cursor = None

    def __init__(
        self, tokens: Tokens, *, batch_size: int, sequence_length: int, seed: int, stream: int, position: int = 0
    ) -> None:
        self._tokens, self._batch_size, self._length = tokens, batch_size, sequence_length
        self._seed, self._stream = seed, stream
        self.position = position

    def batch(self, position: int) -> Tensor:
        """Batch number ``position``: ``[batch_size, sequence_length + 1]`` int64 token ids.

        Windows at uniformly random places, from a counter-based generator, so no state is carried along.
        """
        seed = np.random.SeedSequence([self._seed, self._stream, position])
        last = len(self._tokens) - self._length - 1
        starts = np.random.Generator(np.random.Philox(seed)).integers(0, last + 1, self._batch_size)
        return torch.from_numpy(_windows(self._tokens, starts, self._length))

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """Go on after batch number ``position``."""
        self.position = position

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` batches. A batch counts as taken when it is handed out."""
        for _ in range(count):
            batch = self.batch(self.position)
            self.position += 1
            yield batch

    def close(self) -> None:
        """Nothing is open."""


def validation_batches(tokens: Tokens, *, batches: int, batch_size: int, sequence_length: int) -> list[Tensor]:
    """The same batches for every peer: windows spread evenly over the split, shaped as in :meth:`TokenStream.batch`."""
    windows = batches * batch_size
    starts = np.linspace(0, len(tokens) - sequence_length - 1, windows).astype(np.int64)
    flat = torch.from_numpy(_windows(tokens, starts, sequence_length))
    return list(flat.split(batch_size))


def _windows(tokens: Tokens, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return tokens[starts[:, None] + np.arange(length + 1)[None, :]].astype(np.int64)
