"""Parquet: texts, or token ids with ``attention_mask`` (padding is dropped) as in NoLoCo's Reddit set and in the files
of ``noloco-peer tokenize``. A row group is a shard. It is read 256 rows at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from peer.data.sources.source import MASK_COLUMN, Document, DocumentSource, Wanted, document, parts, size
from peer.data.tokenizer import Tokenizer, fingerprint
from peer.errors import UserError, of_disk

BATCH_ROWS = 256  # rows that are read at once
# In the file's metadata, by noloco-peer tokenize: the tokenizer's name and fingerprint, and JSON with start and end.
TOKENIZER, FINGERPRINT, MADE_OF = b"noloco.tokenizer", b"noloco.tokenizer.fingerprint", b"noloco.source"


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file. ``before``: the number of rows before it in the file."""

    path: Path
    size: int  # of the whole file
    index: int
    before: int
    columns: tuple[str, ...]


class Parquet(DocumentSource):
    """Of ``files``; reads the first of ``columns`` that exists. If a file says which tokenizer, start and end it was
    made with, those must be of ``tokenizer``.
    """

    def __init__(self, files: list[Path], columns: tuple[str, ...], tokenizer: Tokenizer) -> None:
        own = cache(partial(fingerprint, tokenizer))  # asked for each file
        self._groups = [group for path in files for group in _groups(path, columns, tokenizer, own)]
        self.names = [f"{group.path.name}:{group.index}:{group.size}" for group in self._groups]
        self.files = [shard for shard, group in enumerate(self._groups) if not group.before]
        self.parts = parts(len(self.names))

    def rows(self, shard: int, start: int, wanted: Wanted) -> Iterator[tuple[int, Document]]:
        import pyarrow

        group, row = self._groups[shard], 0
        try:
            with _opened(group.path) as file:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group.index], columns=list(group.columns)):
                    for index in range(max(0, start - row), batch.num_rows):
                        if wanted(row + index):
                            where = partial(self.position_text, shard, row + index)
                            mask = _value(batch.column(1)[index]) if len(group.columns) > 1 else None
                            yield row + index, document(_value(batch.column(0)[index]), mask, where)
                    row += batch.num_rows
                    self.passed += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise of_disk(f"{self.position_text(shard, row)}: cannot be read", error) from None

    def position_text(self, shard: int, row: int) -> str:
        group = self._groups[shard]
        return f"{group.path} row {group.before + row + 1}"


def _groups(path: Path, columns: tuple[str, ...], tokenizer: Tokenizer, own: Callable[[], str]) -> list[RowGroup]:
    import pyarrow

    total = size(path)
    try:
        with _opened(path) as file:
            names = file.schema_arrow.names
            metadata = file.schema_arrow.metadata or {}
            made_with, theirs = (metadata.get(key, b"").decode("utf-8", "replace") for key in (TOKENIZER, FINGERPRINT))
            rows = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        what = "cannot be read" if getattr(error, "errno", None) else "is not Parquet that can be read"
        raise of_disk(f"{path}: {what}", error) from None
    column = next((name for name in columns if name in names), None)
    if column is None:
        raise UserError(
            f"{path}: has no column {' or '.join(columns)} (run.data.column), only: {', '.join(names)[:200]}"
        )
    if made_with and made_with != tokenizer.name:
        raise UserError(f"{path}: was made with the tokenizer {made_with}, run.data.tokenizer.name is {tokenizer.name}")
    if theirs and theirs != own():
        raise UserError(f"{path}: was made with another tokenizer called {made_with}; tokenize again, or use that")
    if made_with:
        _require_frame(path, metadata, tokenizer)
    if not sum(rows):
        raise UserError(f"{path} has no rows; remove it or take it out of the patterns of run.data")
    wanted = (column, MASK_COLUMN) if MASK_COLUMN in names and column != MASK_COLUMN else (column,)
    return [RowGroup(path, total, index, sum(rows[:index]), wanted) for index, count in enumerate(rows) if count]


def _require_frame(path: Path, metadata: dict[bytes, bytes], tokenizer: Tokenizer) -> None:
    """Raises :class:`UserError` if the file says another start or end of its documents than the run has. Rows of a file
    that says no start get the run's.
    """
    try:
        made_of = dict(json.loads(metadata[MADE_OF]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return
    names = {id: token for token, id in tokenizer.tokens().items()}
    start, end = made_of.get("start"), made_of.get("end")
    if isinstance(start, list) and start != list(tokenizer.start):
        found, own = ("".join(str(names.get(it, it)) for it in ids) for ids in (start, tokenizer.start))
        raise UserError(
            f"{path}: its documents start with {found!r} and those of the run with {own!r}; set "
            "run.data.tokenizer.path to the tokenizer that made it, or tokenize again"
        )
    if isinstance(end, int) and end != tokenizer.end:
        found, own = names.get(end, str(end)), names.get(tokenizer.end, "")
        raise UserError(
            f"{path}: its documents end with {found!r} and those of the run with {own!r}; set "
            f"run.data.tokenizer.end to {found!r}, or tokenize again"
        )


def _opened(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path, page_checksum_verification=True)


def _value(scalar: Any) -> Any:
    """A list as a NumPy array, without one Python object a token. Anything else as a Python object."""
    import pyarrow

    kind = scalar.type
    listed = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    if not listed or not scalar.is_valid or scalar.values.null_count:
        return scalar.as_py()
    return scalar.values.to_numpy(zero_copy_only=False)
