"""Files that somebody may read at any moment."""

from __future__ import annotations

from pathlib import Path

from peer.errors import UserError


def write_whole(path: Path, text: str, what: str = "", mode: int = 0o644) -> None:
    """Whole or not at all. ``what`` begins the one line of a :class:`UserError`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=mode)
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        raise UserError(f"{what}{path}: {error.strerror}") from None
