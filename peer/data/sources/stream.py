"""Batches from documents that are read during the run.

The documents, each with its end token, are concatenated and cut into windows of T + 1 tokens. The last token of a
window is the first token of the next, so every token is a target once. The windows of a *block* are shuffled by (seed,
stream, block). A checkpoint holds the start of the block, four integers
(:class:`peer.data.sources.documents.DataPosition`), and the number of batches taken. A resume reads one block again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from math import ceil

import numpy as np
from torch import Tensor

from peer.data.batches import Cursor, windows_at
from peer.data.sources.documents import DataPosition, Split
from peer.data.tokenizer import Tokens
from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("data")

MIXING = 2  # distinguishes this use of (seed, stream) from other uses


@dataclass(frozen=True)
class Shape:
    """The shape of a batch. ``shuffle``: the smallest number of windows in a block."""

    batch_size: int
    sequence_length: int
    shuffle: int

    @property
    def batches(self) -> int:
        """The number of batches in a block."""
        return ceil(self.shuffle / self.batch_size)


class DocumentStream:
    """An endless :class:`peer.data.batches.BatchStream` of ``split``."""

    def __init__(self, split: Split, shape: Shape, *, seed: int, stream: int) -> None:
        self._split, self.shape, self._seed, self._stream = split, shape, seed, stream
        self._batches: Iterator[tuple[Tensor, DataPosition]] | None = None
        self._place = DataPosition()  # start of the next batch's block
        self.position = 0

    @property
    def cursor(self) -> Cursor:
        return {"place": list(astuple(self._place)), "files": self._split.fingerprint}

    def passed(self) -> int:
        """Rows of the source read so far, skipped ones too."""
        return self._split.source.passed

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """See :class:`BatchStream`. If the files have changed, the stream starts a new epoch with the new files."""
        self._batches, self.position, self._place = None, position, DataPosition()
        if cursor is not None and cursor["files"] == self._split.fingerprint:
            self._place = DataPosition(*cursor["place"])
        elif cursor is not None:
            self._place = DataPosition(cursor["place"][0] + 1)
            log.warning("the data files differ from those of the checkpoint: this stream starts a new epoch")

    def take(self, count: int) -> Iterator[Tensor]:
        if self._batches is None:
            self._batches = self._from_here()
        for _ in range(count):
            batch, place = next(self._batches)
            self.position, self._place = self.position + 1, place
            yield batch

    def close(self) -> None:
        self._batches = None

    def _from_here(self) -> Iterator[tuple[Tensor, DataPosition]]:
        """Batches, each with the start of the next batch's block."""
        shape, start = self.shape, self._place
        number, done = divmod(self.position, shape.batches)
        packer = _Packer(self._split, start, shape, seed=self._seed, stream=self._stream)
        while True:
            tokens, end = packer.block()
            seed = np.random.SeedSequence([self._seed, self._stream, number, MIXING])
            order = np.random.Generator(np.random.Philox(seed)).permutation(shape.batches * shape.batch_size)
            for index in range(done, shape.batches):
                chosen = order[index * shape.batch_size : (index + 1) * shape.batch_size]
                last = index + 1 == shape.batches
                windows = windows_at(tokens, chosen * shape.sequence_length, shape.sequence_length)
                yield windows, end if last else start
            start, number, done = end, number + 1, 0


class _Packer:
    """Consecutive blocks of tokens. A block begins with the last token of the previous block."""

    def __init__(self, split: Split, start: DataPosition, shape: Shape, *, seed: int, stream: int) -> None:
        self._documents = split.documents(start, seed=seed, stream=stream)
        self._shape, self._split = shape, split
        self._place, self._tokens = next(self._documents)
        self._at = min(start.offset, len(self._tokens) - 1) if self._place == replace(start, offset=0) else 0
        whole = start == DataPosition(start.epoch)
        self._epoch_tokens = len(self._tokens) if whole else None  # None: not read from the epoch's start

    def block(self) -> tuple[Tokens, DataPosition]:
        """The tokens of a block, and the start of the next block."""
        size = self._shape.batches * self._shape.batch_size * self._shape.sequence_length + 1
        out = np.empty(size, dtype=self._tokens.dtype)
        filled = 0
        while filled < size:
            if self._at == len(self._tokens):
                self._next()
            some = min(size - filled, len(self._tokens) - self._at)
            out[filled : filled + some] = self._tokens[self._at : self._at + some]
            filled, self._at = filled + some, self._at + some
        self._at -= 1
        return out, replace(self._place, offset=self._at)

    def _next(self) -> None:
        before = self._place.epoch
        self._place, self._tokens = next(self._documents)
        self._at = 0
        if self._place.epoch == before:
            if self._epoch_tokens is not None:
                self._epoch_tokens += len(self._tokens)
            return
        needed = self._shape.batch_size * self._shape.sequence_length + 1
        if self._epoch_tokens is not None and self._epoch_tokens < needed:
            first = self._split.source.position_text(0, 0)
            raise UserError(
                f"run.data: all files together have {self._epoch_tokens} tokens ({first} and "
                f"on), less than one batch of {needed}; add data, or lower run.batch_size or run.data.sequence_length"
            )
        self._epoch_tokens = len(self._tokens)
