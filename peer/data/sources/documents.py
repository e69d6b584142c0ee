"""A split of a source as token documents: in which order the pieces are read, and which rows are held out.

A *piece* is every ``parts``-th row of a shard. A stream reads the pieces in an order that is drawn from (seed, stream,
epoch), each piece once an epoch. So no peer needs to know the number of peers. Two streams are independent drawings
without replacement: when each has read a share f of the data, f² of it is common to both, in expectation. At one moment
they read the same piece with probability 1 / pieces. Only a known number of peers could make them disjoint.

The content of a row decides whether it is held out, so a document is held out by every peer that has it, whatever its
file is called there. A text and its token ids are two contents, but peers of one run agree on the format and column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from peer.data.sources.source import Document, DocumentSource
from peer.data.tokenizer import Tokenizer, Tokens, dtype, framed, unframed
from peer.errors import UserError

HELD_OUT_ROWS = 100  # one row in 100 is held out, but for a validation split that all peers have
TOKENISED_AT_ONCE = 64  # documents
ORDER = 1  # distinguishes this use of (seed, stream) from other uses


@dataclass(frozen=True)
class DataPosition:
    """A position in a stream: token ``offset`` of a row (counted within its shard) of the ``index``-th piece."""

    epoch: int = 0
    index: int = 0
    row: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Split:
    """``held_out``: the held-out rows (``True``), the other rows (``False``), all rows (``None``)."""

    source: DocumentSource
    tokenizer: Tokenizer
    held_out: bool | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the files do."""
        names = chr(10).join(self.source.names).encode(errors="surrogateescape")  # which need be no UTF-8
        return f"{crc32(names):08x}"

    def documents(self, start: DataPosition, *, seed: int, stream: int) -> Iterator[tuple[DataPosition, Tokens]]:
        """An endless stream of documents, each with its start and end tokens, from ``start`` on."""
        place = start
        while True:
            order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, place.epoch, ORDER])))
            pieces = order.permutation(len(self.source.names) * self.source.parts)
            some = False
            for index in range(place.index, len(pieces)):
                shard, part = divmod(int(pieces[index]), self.source.parts)
                for row, tokens in self._rows(shard, place.row, part, self.source.parts):
                    some = True
                    yield DataPosition(place.epoch, index, row), tokens
                place = replace(place, row=0)
            if not some and not place.index:
                raise UserError(
                    f"{self.source.position_text(0, 0)} and all other files of run.data have no text in them to use"
                )
            place = DataPosition(place.epoch + 1)

    def heads(self, count: int) -> Tokens:
        """``count`` tokens or a few more: of each file as many from its beginning, and more of others for files that
        are shorter. All tokens if there are fewer. Of held-out rows the first ones: with 99 of 100 rows skipped, it
        would take long to begin every file.
        """
        begins = [0] if self.held_out else self.source.files
        files = [range(*it) for it in zip(begins, [*begins[1:], len(self.source.names)], strict=True)]
        share = ceil(count / len(files))
        found = [self._head(shards, share) for shards in files]
        missing = count - sum(map(len, found))
        for index, shards in enumerate(files):
            if missing > 0 and len(found[index]) == share:
                found[index] = self._head(shards, share + missing)
                missing -= len(found[index]) - share
        return np.concatenate(found)

    def _head(self, shards: range, count: int) -> Tokens:
        """The first ``count`` tokens. A document that is cut ends with the end token too."""
        kind = dtype(self.tokenizer.vocabulary)
        found: list[Tokens] = [np.empty(0, dtype=kind)]
        left = count
        for tokens in (tokens for shard in shards for _, tokens in self._rows(shard, 0, 0, 1, at_once=1)):
            found.append(tokens[:left].astype(kind))
            left -= len(found[-1])
            if left <= 0:
                found[-1][-1] = self.tokenizer.end
                break
        return np.concatenate(found)

    def in_order(self) -> Iterator[Tokens]:
        """All documents in the order of the files, each with its start and end tokens."""
        for shard in range(len(self.source.names)):
            for _, tokens in self._rows(shard, 0, 0, 1):
                yield tokens

    def _rows(
        self, shard: int, start: int, part: int, parts: int, at_once: int = TOKENISED_AT_ONCE
    ) -> Iterator[tuple[int, Tokens]]:
        rows = (
            (row, it)
            for row, it in self.source.rows(shard, start, lambda row: row % parts == part)
            if self.held_out is None or self.held_out == _is_held_out(it, self.tokenizer)
        )
        while some := list(islice(rows, at_once)):
            texts = iter(self.tokenizer.encode([it for _, it in some if isinstance(it, str)]))
            for row, it in some:
                ids = next(texts) if isinstance(it, str) else self._checked(it, shard, row)
                if len(ids):
                    yield row, framed(ids, self.tokenizer)

    def _checked(self, ids: NDArray[np.integer[Any]], shard: int, row: int) -> Tokens:
        bad = ids[(ids < 0) | (ids >= self.tokenizer.vocabulary)]
        if len(bad):
            raise UserError(
                f"{self.source.position_text(shard, row)}: has the token id {bad[0]}, run.data.tokenizer.vocabulary is "
                f"{self.tokenizer.vocabulary}; which tokenizer was it made with?"
            )
        return ids.astype(dtype(self.tokenizer.vocabulary))


def _is_held_out(document: Document, tokenizer: Tokenizer) -> bool:
    """Token ids may have their start and end tokens or not, as these are added to those without."""
    if isinstance(document, str):
        return crc32(document.encode("utf-8")) % HELD_OUT_ROWS == 0
    ids = unframed(document, tokenizer)
    return crc32(ids.astype("<i8", copy=False).tobytes()) % HELD_OUT_ROWS == 0
