"""Batches from documents that are read while the run goes on.

Documents, each with its end token, stand one after another and are cut into windows of T + 1 tokens; the last token
of a window is the first of the next, so every token is a target once. A *block* of windows is mixed by (seed, stream,
block). Where a block begins is four integers (:class:`peer.data.sources.documents.DataPosition`); they and the number
of batches taken are all that a checkpoint holds, and a resume reads one block again, not the data before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.data.batches import Cursor
from peer.data.sources.documents import DataPosition, Split
from peer.data.tokenizer import Tokens
from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("data")

MIXING = 2  # tells this use of (seed, stream) from others


@dataclass(frozen=True)
class Shape:
    """Of a batch, and how many windows are mixed at least."""

    batch_size: int
    sequence_length: int
    shuffle: int

    @property
    def batches(self) -> int:
        """In a block."""
        return ceil(self.shuffle / self.batch_size)


class DocumentStream:
    """An endless :class:`peer.data.batches.BatchStream` of ``split``."""

    def __init__(self, split: Split, shape: Shape, *, seed: int, stream: int) -> None:
        self._split, self._shape, self._seed, self._stream = split, shape, seed, stream
        self._batches: Iterator[tuple[Tensor, DataPosition]] | None = None
        self._place = DataPosition()  # where the block begins that the next batch is of
        self.position = 0

    @property
    def cursor(self) -> Cursor:
        """For :meth:`resume`."""
        return {"place": list(astuple(self._place)), "files": self._split.fingerprint}

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """Go on after batch number ``position``. With other files than before it begins with them anew."""
        self._batches, self.position, self._place = None, position, DataPosition()
        if cursor is not None and cursor["files"] == self._split.fingerprint:
            self._place = DataPosition(*cursor["place"])
        elif cursor is not None:
            self._place = DataPosition(cursor["place"][0] + 1)
            log.warning("the data files are not those of the checkpoint: this stream begins with them anew")

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` batches. A batch counts as taken when it is handed out."""
        if self._batches is None:
            self._batches = self._from_here()
        for _ in range(count):
            batch, place = next(self._batches)
            self.position, self._place = self.position + 1, place
            yield batch

    def close(self) -> None:
        """Let go of the files."""
        self._batches = None

    def _from_here(self) -> Iterator[tuple[Tensor, DataPosition]]:
        """Batches, each with the place at which the next one's block begins."""
        shape, start = self._shape, self._place
        number, done = divmod(self.position, shape.batches)
        packer = _Packer(self._split, start, shape, seed=self._seed, stream=self._stream)
        while True:
            tokens, end = packer.block()
            seed = np.random.SeedSequence([self._seed, self._stream, number, MIXING])
            order = np.random.Generator(np.random.Philox(seed)).permutation(shape.batches * shape.batch_size)
            for index in range(done, shape.batches):
                chosen = order[index * shape.batch_size : (index + 1) * shape.batch_size]
                last = index + 1 == shape.batches
                yield torch.from_numpy(_windows(tokens, chosen, shape.sequence_length)), end if last else start
            start, number, done = end, number + 1, 0


class _Packer:
    """Blocks of tokens one after the other; a block begins with the last token of the one before."""

    def __init__(self, split: Split, start: DataPosition, shape: Shape, *, seed: int, stream: int) -> None:
        self._documents = split.documents(start, seed=seed, stream=stream)
        self._shape, self._split = shape, split
        self._place, self._tokens = next(self._documents)
        self._at = min(start.offset, len(self._tokens) - 1) if self._place == replace(start, offset=0) else 0
        whole = start == DataPosition(start.epoch)
        self._epoch_tokens = len(self._tokens) if whole else None  # none: the epoch is not read from its beginning

    def block(self) -> tuple[Tokens, DataPosition]:
        """The tokens of a block, and the place at which the next one begins."""
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


def _windows(tokens: Tokens, numbers: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    starts = np.asarray(numbers) * length
    return tokens[starts[:, None] + np.arange(length + 1)[None, :]].astype(np.int64)
