"""Reads ``rounds.jsonl`` and ``evals.jsonl``, to which a peer appends one JSON object a line.

A kill may have cut the last line short, and a reader may come while one is written: only whole objects are rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROUNDS, EVALS = "rounds.jsonl", "evals.jsonl"

Row = dict[str, Any]


class RunLog:
    """One file. ``rows``: all that was read of it, in its order."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._read = 0  # bytes

    def poll(self) -> list[Row]:
        """Read on where the last call stopped; returns the new rows, none when there is no file.

        A file that has become shorter is read anew: a resumed peer took back what it will do again.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._read:
                    self.rows.clear()
                    self._read = 0
                file.seek(self._read)
                lines = file.readlines()
        except OSError:
            return []
        fresh = []
        for line in lines:
            row = _parsed(line)
            if row is None and not line.endswith(b"\n"):
                break  # it is not whole yet
            self._read += len(line)
            if row is not None:
                fresh.append(row)
        self.rows += fresh
        return fresh


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that nobody writes to any more."""
    return RunLog(path).poll()


def _parsed(line: bytes) -> Row | None:
    """``None`` for what is no object; no part of an object from its beginning is one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
