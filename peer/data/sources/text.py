"""Plain text files. A row is a piece of at most 64 KiB. It ends at a line's end, unless a line is longer than that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from peer.data.sources.source import Document, DocumentSource, Wanted, parts, size
from peer.errors import UserError, of_disk

PIECE_BYTES = 64 * 1024  # bytes


class Texts(DocumentSource):
    """Of ``files``. Each file is a shard."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self.names = [f"{path.name}:{size(path)}" for path in files]
        self.files = list(range(len(files)))
        self.parts = parts(len(files))

    def rows(self, shard: int, start: int, wanted: Wanted) -> Iterator[tuple[int, Document]]:
        path = self._files[shard]
        for row, piece in enumerate(pieces(path)):
            self.passed += 1
            if row >= start and wanted(row):
                yield row, piece.decode("utf-8")

    def position_text(self, shard: int, row: int) -> str:
        return f"{self._files[shard]} piece {row + 1}"


def pieces(path: Path) -> Iterator[bytes]:
    """The pieces of a file, each valid UTF-8. Raises :class:`UserError` for a file that is not UTF-8."""
    at, left = 0, b""
    try:
        with path.open("rb") as file:
            while data := left + file.read(PIECE_BYTES - len(left)):
                end = _end(data) if len(data) == PIECE_BYTES else len(data)
                data[:end].decode("utf-8")
                yield data[:end]
                at, left = at + end, data[end:]
    except OSError as error:
        raise of_disk(f"{path}: cannot be read", error) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} byte {at + error.start + 1}: is not UTF-8 text") from None


def _end(data: bytes) -> int:
    """The end of the last line, or else of the last whole character."""
    line = data.rfind(b"\n") + 1
    if line:
        return line
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:  # continuation bytes of a character
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else len(data)
