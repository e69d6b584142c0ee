"""JSON Lines, plain or .gz, as C4 has them.

A plain file is divided into ranges of 16 MiB. Each range is a shard, which can be read without the ranges before it. A
.gz file is one shard: a row can be read only after all rows before it. Its checksum is at its end, so a file of up to 1
GiB is read once in full before its first row is used. In a larger one the rows before an error are trained on.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from peer.data.sources.source import MASK_COLUMN, Document, DocumentSource, Wanted, document, parts, size
from peer.errors import UserError, of_disk

RANGE_BYTES = 16 * 2**20  # bytes of a shard of a plain file
CHECKED = 2**30  # bytes; a compressed file up to this size is checked in full before it is used
LONGEST_LINE = 64 * 2**20  # bytes of a row
READ_BYTES = 2**20
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True)
class FileRange:
    """The rows of a file that start at byte ``begin`` or later and before ``end`` (``None``: the end of the file)."""

    path: Path
    size: int  # of the whole file
    begin: int
    end: int | None


class JsonLines(DocumentSource):
    """Of ``files``: of each row the first of ``columns`` that it has, a text or token ids."""

    def __init__(self, files: list[Path], columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._ranges = [part for path in files for part in _ranges_of(path)]
        self._checked: set[Path] = set()
        self.names = [f"{part.path.name}:{part.begin}:{part.size}" for part in self._ranges]
        self.files = [shard for shard, part in enumerate(self._ranges) if not part.begin]
        self.parts = parts(len(self.names))

    def rows(self, shard: int, start: int, wanted: Wanted) -> Iterator[tuple[int, Document]]:
        part = self._ranges[shard]
        self._check(part.path)
        row = -1
        try:
            for row, line in enumerate(_lines(part)):
                self.passed += 1
                if row >= start and wanted(row) and not line.isspace():
                    yield row, self._document(line, partial(self.position_text, shard, row))
        except (*DAMAGED, OSError) as error:
            # Counting the rows before this range would read the file again.
            where = part.path if part.begin else self.position_text(shard, row + 1)
            raise of_disk(f"{where}: cannot be read", error) from None
        if row < 0 and not part.begin:
            raise UserError(f"{part.path} has no rows; remove it or take it out of the patterns of run.data")

    def position_text(self, shard: int, row: int) -> str:
        part = self._ranges[shard]
        return f"{part.path} row {_rows_before(part) + row + 1}"

    def _document(self, line: bytes, where: Callable[[], str]) -> Document:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where()}: is not JSON: {line[:40]!r}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where()}: is not a JSON object")
        column = next((name for name in self._columns if name in row), None)
        if column is None:
            wanted, found = " or ".join(map(repr, self._columns)), ", ".join(sorted(map(str, row))[:8])
            raise UserError(f"{where()}: has no {wanted} (run.data.column), only: {found}"[:300])
        return document(row[column], row.get(MASK_COLUMN), where)

    def _check(self, path: Path) -> None:
        if not _packed(path) or path in self._checked or size(path) > CHECKED:
            return
        rows = 0
        try:
            with _opened(path) as file:
                while piece := file.read(READ_BYTES):
                    rows += piece.count(b"\n")
                    self.passed += 1  # a row of any length
        except DAMAGED as error:
            advice = "; nothing of the file was used, fetch it again"
            raise of_disk(f"{path} row {rows + 1}: broken gzip", error, advice) from None
        except OSError as error:
            raise of_disk(f"{path} row {rows + 1}: cannot be read", error) from None
        self._checked.add(path)


def _ranges_of(path: Path) -> list[FileRange]:
    total = size(path)
    if _packed(path):
        return [FileRange(path, total, 0, None)]
    return [FileRange(path, total, begin, min(begin + RANGE_BYTES, total)) for begin in range(0, total, RANGE_BYTES)]


def _packed(path: Path) -> bool:
    return path.suffix == ".gz"


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if _packed(path) else path.open("rb")


def _lines(part: FileRange) -> Iterator[bytes]:
    with _opened(part.path) as file:
        at = part.begin
        if at:
            file.seek(at - 1)
            at += len(_line(file, part.path)) - 1  # the line before this range ends here
        while part.end is None or at < part.end:
            line = _line(file, part.path)
            if not line:
                return
            at += len(line)
            yield line


def _line(file: BinaryIO, path: Path) -> bytes:
    line = file.readline(LONGEST_LINE)
    if len(line) == LONGEST_LINE:
        raise UserError(f"{path}: a row has {LONGEST_LINE // 2**20} MiB or more; is this JSON Lines?")
    return line


def _rows_before(part: FileRange) -> int:
    """Counted for messages only."""
    rows, left = 0, part.begin
    if not left:
        return 0
    with part.path.open("rb") as file:
        while left > 0 and (piece := file.read(min(READ_BYTES, left))):
            rows, left, last = rows + piece.count(b"\n"), left - len(piece), piece[-1:]
        return rows + (last != b"\n")
