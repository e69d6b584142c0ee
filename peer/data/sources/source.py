"""The interface of a source of documents: shards (files or parts of files) of rows, each a text or token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from peer.errors import UNREACHED, UserError, of_disk
from peer.logs import get_logger

log = get_logger("data")

Document = str | NDArray[np.integer[Any]]  # a text, or the token ids of a text
Wanted = Callable[[int], bool]

MASK_COLUMN = "attention_mask"  # of token ids: 1 a token, 0 padding
PIECES = 64  # a data set has at least so many pieces, which each peer reads in its own order


class DocumentSource(Protocol):
    """``names``: of the shards; a name contains the size. ``files``: the first shard of each file, or 0 alone.
    ``parts``: a piece is every ``parts``-th row of a shard. ``passed``: rows read so far, skipped ones too: it grows
    while a resume looks for its row, which may take hours.
    """

    names: list[str]
    files: list[int]
    parts: int = 1
    passed: int = 0

    def rows(self, shard: int, start: int, wanted: Wanted) -> Iterator[tuple[int, Document]]:
        """The rows of ``shard`` from row ``start`` on for which ``wanted`` is true. Other rows are not parsed.

        Raises :class:`UserError` with file and row for data that cannot be read and for a row that is no document, and
        :class:`peer.errors.RunError` if the file server is away.
        """

    def position_text(self, shard: int, row: int) -> str:
        """File and row, for messages."""


def parts(shards: int, pieces: int = PIECES) -> int:
    """The number of parts of a shard that makes ``pieces`` pieces or more."""
    return ceil(pieces / max(1, shards))


def paths(patterns: Iterable[str], key: str) -> list[Path]:
    """The files that match, each once, sorted within each pattern. Raises :class:`UserError` when there is none."""
    all_found: dict[Path, Path] = {}
    for pattern in patterns:
        try:
            full = Path(pattern).expanduser().absolute()
            matching = Path(full.anchor).glob(str(full.relative_to(full.anchor)))
            found = sorted(path for path in matching if path.is_file())
            if not found:
                _require_no_outage(full.parent)
        except (ValueError, RuntimeError, IndexError) as error:
            raise UserError(f"{key}: {pattern!r} is not a pattern: {error}") from None
        except OSError as error:
            raise of_disk(f"{key}: cannot read {pattern}", error) from None
        if not found:
            raise UserError(f"{key}: no file matches {pattern}")
        for path in found:
            all_found.setdefault(path.resolve(), path)
    return list(all_found.values())


def _require_no_outage(folder: Path) -> None:
    """Raises ``OSError`` if its file server is away: from Python 3.12 on such a folder has no files that match."""
    try:
        folder.stat()
    except OSError as error:
        if error.errno in UNREACHED:
            raise


def without(files: list[Path], left_out: Iterable[Path]) -> list[Path]:
    """The files to train on, without those that are validated on, ``left_out``."""
    others = {path.resolve() for path in left_out}
    left = [path for path in files if path.resolve() not in others]
    if not left:
        raise UserError("run.data: all files to train on are in run.data.validation or run.evaluation.sets; add others")
    if len(left) < len(files):
        log.info(
            "%d of the %d files to train on are left out: they are validated on", len(files) - len(left), len(files)
        )
    return left


def size(path: Path) -> int:
    """Bytes of a file that must not be empty."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise of_disk(f"cannot read {path}", error) from None
    if not found:
        raise UserError(f"{path} is empty; remove it or take it out of the patterns of run.data")
    return found


def document(value: Any, mask: Any, where: Callable[[], str]) -> Document:
    """``value`` as a document; of token ids those where ``mask`` is 1, or all if ``mask`` is ``None``."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where()}: is not a text that UTF-8 can hold") from None
        return value
    ids = _array(value if isinstance(value, list | np.ndarray) else None)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        found = "empty" if value is None else f"of type {type(value).__name__}"
        raise UserError(f"{where()}: is {found}, neither a text nor a list of token ids")
    ids = ids.astype(np.int64, copy=False)
    if mask is None:
        return ids
    kept = _array(mask)
    if kept.shape != ids.shape or not np.all((kept == 0) | (kept == 1)):  # np.isin takes ten times as long
        raise UserError(f"{where()}: attention_mask is not {len(ids)} times 0 or 1")
    return ids[kept.astype(bool)]


def _array(value: Any) -> NDArray[Any]:
    """Of lists of unlike lengths: no array of one dimension."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)
