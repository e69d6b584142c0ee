"""Any data set that the ``datasets`` library reads: by its name on the Hub, or a local folder or file.

In a downloaded or local data set a shard is a range of rows of the memory-mapped table. With ``streaming`` a shard is a
remote file; skipped rows are transferred too. Only this module imports the library, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

from peer.config.data import HuggingFaceData
from peer.data.sources.source import MASK_COLUMN, PIECES, Document, DocumentSource, Wanted, document, parts, without
from peer.errors import UserError
from peer.hub.answers import library_errors
from peer.logs import get_logger

log = get_logger("data")

RANGE_ROWS = 4096  # rows of a shard of a table
TABLE_ROWS = 256  # rows that are read at once
STREAMED_PIECES = 8  # few, because each part of a file transfers the whole file


class TableSource(DocumentSource):
    """Of a table with random access."""

    def __init__(self, table: Any, name: str, column: str) -> None:
        self._table, self._name, self._column = table, name, column
        self._range = min(RANGE_ROWS, ceil(len(table) / PIECES))
        self.names = [f"{Path(name).name}:{begin}:{len(table)}" for begin in range(0, len(table), self._range)]
        self.files = [0]

    def rows(self, shard: int, start: int, wanted: Wanted) -> Iterator[tuple[int, Document]]:
        begin = shard * self._range
        end = min(begin + self._range, len(self._table))
        for at in range(begin + start, end, TABLE_ROWS):
            with library_errors(self.position_text(shard, at - begin)):
                rows = self._table[at : min(at + TABLE_ROWS, end)]
            self.passed += TABLE_ROWS
            for index, value in enumerate(rows[self._column]):
                row = at + index - begin
                if wanted(row) and not _is_null(value):
                    mask = rows[MASK_COLUMN][index] if MASK_COLUMN in rows else None
                    yield row, document(value, mask, partial(self.position_text, shard, row))

    def position_text(self, shard: int, row: int) -> str:
        return f"{self._name} row {shard * self._range + row + 1}"


class StreamedSource(DocumentSource):
    """Of a streamed data set."""

    def __init__(self, rows: Any, name: str, column: str) -> None:
        self._rows, self._name, self._column = rows, name, column
        self._count = max(1, rows.num_shards)
        self.names = [f"{Path(name).name}:{shard}:{self._count}" for shard in range(self._count)]
        self.files = [0]  # not each shard: every one that is begun is a file to fetch
        self.parts = parts(self._count, STREAMED_PIECES)

    def rows(self, shard: int, start: int, wanted: Wanted) -> Iterator[tuple[int, Document]]:
        with library_errors(self.position_text(shard, 0)):
            found = iter(self._rows.shard(num_shards=self._count, index=shard) if self._count > 1 else self._rows)
        for row in count():  # the library's own skip reads them too, and says nothing until it is done
            with library_errors(self.position_text(shard, row)):
                it = next(found, None)
            if it is None:
                return
            self.passed += 1
            if row >= start and wanted(row) and not (self._column in it and _is_null(it[self._column])):
                where = partial(self.position_text, shard, row)
                yield row, document(it.get(self._column), it.get(MASK_COLUMN), where)

    def position_text(self, shard: int, row: int) -> str:
        return f"{self._name} shard {shard + 1} of {self._count} row {row + 1}"


def _is_null(value: Any) -> bool:
    """Such a row is skipped, as an empty text is: who trains on a data set of others cannot mend it."""
    if value is None:
        _warn_of_null()
    return value is None


@cache
def _warn_of_null() -> None:
    """Once in a process."""
    log.warning("run.data: a row of the data set has no text (null); it is skipped, and so are all such rows")


def load(settings: HuggingFaceData, split: str, left_out: Iterable[Path] = ()) -> DocumentSource:
    """One split of the data set, of a local one without the files ``left_out``.

    Raises :class:`UserError` if the set, the split or the column does not exist.
    """
    name = f"{settings.path} {split}"
    with library_errors(f"run.data.path: cannot load {name}"):
        found = _load(settings, split, list(left_out))
    names = found.column_names
    if names is not None and settings.column not in names:
        raise UserError(f"run.data.column: {name} has no {settings.column!r}, only: {', '.join(names)[:200]}")
    if names is not None:
        found = found.select_columns([column for column in (settings.column, MASK_COLUMN) if column in names])
    if settings.streaming:
        return StreamedSource(found, name, settings.column)
    if not len(found):
        raise UserError(f"run.data: {name} has no rows")
    return TableSource(found, name, settings.column)


def _load(settings: HuggingFaceData, split: str, left_out: list[Path]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    local = Path(settings.path).expanduser()
    if not any((local / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        path, file = str(local) if local.exists() else settings.path, None
        if local.is_file():
            path, file = str(local.parent), local.name
        files = _without(path, settings.subset, file, split, left_out) if left_out and local.exists() else file
        how = {"split": split, "streaming": settings.streaming}
        return datasets.load_dataset(path, settings.subset, data_files=files, **how)
    # Written by save_to_disk, which also keeps a format, such as tensors.
    found: Any = datasets.load_from_disk(str(local)).with_format(None)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UserError(f"run.data.split: {local} has no {split!r}, only: {', '.join(map(str, found))}")
        found = found[split]
    elif settings.validation_split is not None:
        raise UserError(f"run.data.validation_split: {local} has no splits; leave it out: one row in 100 is held out")
    elif split not in ("train", str(found.split)):
        raise UserError(f"run.data.split: {local} has no splits, so no {split!r}; leave it out")
    return found.to_iterable_dataset(num_shards=1) if settings.streaming else found


def _without(path: str, subset: str | None, file: str | None, split: str, left_out: list[Path]) -> Any:
    """``data_files`` of a local data set for ``split``, which may be an expression such as ``train[:90%]+test``."""
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList

    found = datasets.load_dataset_builder(path, subset, data_files=file).config.data_files
    read = {part.partition("[")[0].strip() for part in split.split("+")}
    kept = DataFilesDict()
    for name, files in found.items():
        if name in read or "all" in read:
            names = {str(one) for one in without([Path(one) for one in files], left_out)}
            kept[name] = DataFilesList([one for one in files if str(Path(one)) in names], files.origin_metadata)
    # The library's cache depends on data_files: it stays valid if no file is left out.
    return file if all(len(files) == len(found[name]) for name, files in kept.items()) else kept
