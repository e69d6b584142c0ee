"""Reads ``rounds.jsonl`` and ``evals.jsonl``: one JSON object a line.

The last line may be incomplete, after a kill or during a write. Only complete objects are rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROUNDS, EVALS = "rounds.jsonl", "evals.jsonl"

Row = dict[str, Any]


class RunLog:
    """One file. ``rows``: all rows read so far, in the file's order."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._read = 0  # bytes

    def poll(self) -> list[Row]:
        """Read from where the last call ended; returns the new rows, none when there is no file.

        A file that became shorter is read from its start: a resumed peer removed the rounds that it will repeat.
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
                break  # it is not complete yet
            self._read += len(line)
            if row is not None:
                fresh.append(row)
        self.rows += fresh
        return fresh


def read_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    return RunLog(path).poll()


def _parsed(line: bytes) -> Row | None:
    """``None`` unless ``line`` is a JSON object. A truncated object never is one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
