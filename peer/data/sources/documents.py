"""A split of a source as token documents: which piece comes when, from where on, and what is held out.

A *piece* is one part of one shard: every ``parts``-th row of it. A stream reads the pieces in an order of its own,
drawn from (seed, stream, epoch), each piece once an epoch. So nobody needs to know how many peers there are, and what
two of them read is as disjoint as two independent drawings without replacement: when each has read a share f of the
data, they have f² of all in common in expectation (1% of the data after a tenth each), and at one moment two read the
same piece with a probability of one in as many pieces as there are (64 at the least; 8 when a set is streamed from
afar). It is not disjoint for certain; only a world size could promise that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from zlib import crc32

import numpy as np

from peer.data.sources.source import Document, DocumentSource
from peer.data.tokenizer import Tokenizer, Tokens, dtype
from peer.errors import UserError

HELD_OUT_ROWS = 100  # one row in so many is validation, where a source has no validation split
TOKENISED_AT_ONCE = 64  # documents that are tokenised at once
ORDER = 1  # tells this use of (seed, stream) from others


@dataclass(frozen=True)
class DataPosition:
    """Where a stream is: at token ``offset`` of a row (counted within its shard) of the ``index``-th piece."""

    epoch: int = 0
    index: int = 0
    row: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Split:
    """``held_out``: the held-out rows (true), the others (false), all of them (none)."""

    source: DocumentSource
    tokenizer: Tokenizer
    held_out: bool | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the files do."""
        return f"{crc32(chr(10).join(self.source.names).encode()):08x}"

    def documents(self, start: DataPosition, *, seed: int, stream: int) -> Iterator[tuple[DataPosition, Tokens]]:
        """Documents without end, each with its end token, from the one at ``start`` on."""
        place = start
        while True:
            order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, place.epoch, ORDER])))
            pieces = order.permutation(len(self.source.names) * self.source.parts)
            some = False
            for index in range(place.index, len(pieces)):
                shard, part = divmod(int(pieces[index]), self.source.parts)
                for row, tokens in self._piece(shard, part, place.row):
                    some = True
                    yield DataPosition(place.epoch, index, row), tokens
                place = replace(place, row=0)
            if not some and not place.index:
                raise UserError(
                    f"{self.source.position_text(0, 0)} and all other files of run.data have no text in them"
                )
            place = DataPosition(place.epoch + 1)

    def head(self, count: int) -> Tokens:
        """The first ``count`` tokens in the order of the files, or fewer where there are no more."""
        kind = dtype(self.tokenizer.vocabulary)
        found: list[Tokens] = [np.empty(0, dtype=kind)]
        left = count
        for tokens in self.in_order():
            found.append(tokens[:left].astype(kind))
            left -= len(found[-1])
            if left <= 0:
                break
        return np.concatenate(found)

    def in_order(self) -> Iterator[Tokens]:
        """All documents in the order of the files, each with its end token."""
        for shard in range(len(self.source.names)):
            for _, tokens in self._rows(shard, 0, 0, 1):
                yield tokens

    def _piece(self, shard: int, part: int, start: int) -> Iterator[tuple[int, Tokens]]:
        return self._rows(shard, start, part, self.source.parts)

    def _rows(self, shard: int, start: int, part: int, parts: int) -> Iterator[tuple[int, Tokens]]:
        def wanted(row: int) -> bool:
            return row % parts == part and self.held_out in (None, crc32(b"%d" % row, salt) % HELD_OUT_ROWS == 0)

        salt = crc32(self.source.names[shard].encode())
        rows = self.source.rows(shard, start, wanted)
        while some := list(islice(rows, TOKENISED_AT_ONCE)):
            texts = iter(self.tokenizer.encode([it for _, it in some if isinstance(it, str)]))
            for row, it in some:
                ids = next(texts) if isinstance(it, str) else self._known(it, shard, row)
                if len(ids):
                    yield row, _ended(ids, self.tokenizer)

    def _known(self, ids: Document, shard: int, row: int) -> Tokens:
        assert not isinstance(ids, str)
        bad = ids[(ids < 0) | (ids >= self.tokenizer.vocabulary)]
        if len(bad):
            raise UserError(
                f"{self.source.position_text(shard, row)}: has the token id {bad[0]}, run.data.tokenizer.vocabulary is "
                f"{self.tokenizer.vocabulary}; which tokenizer was it made with?"
            )
        return ids.astype(dtype(self.tokenizer.vocabulary))


def _ended(ids: Tokens, tokenizer: Tokenizer) -> Tokens:
    return ids if ids[-1] == tokenizer.end else np.append(ids, ids.dtype.type(tokenizer.end))
