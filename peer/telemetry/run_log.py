"""Reads and writes ``rounds.jsonl`` and ``evals.jsonl``: one JSON object a line.

The last line may be incomplete, after a kill or during a write. Only complete objects are rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from peer.config.files import replacing
from peer.logs import get_logger

log = get_logger("run_log")

ROUNDS, EVALS = "rounds.jsonl", "evals.jsonl"

Row = dict[str, Any]


class RunLog:
    """One file. ``anew``: the last call of :meth:`poll` began at its start, because it had become shorter."""

    def __init__(self, path: Path) -> None:
        self.anew = False
        self._path = path
        self._read = 0  # bytes

    def poll(self) -> list[Row]:
        """Read from where the last call ended; returns the new rows, none when there is no file.

        A file that became shorter is read from its start: a resumed peer removed the rounds that it will repeat.
        """
        self.anew = False
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._read:
                    self.anew = True
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
        return fresh


def read_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    return RunLog(path).poll()


class RowWriter:
    """Writes one file. Training does not depend on it: an error of the disk is logged, and the row is lost."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path = path
        self._failing = False  # it warned, and no row was written since

    def append(self, row: Row) -> None:
        """Write a row at the end. A number that is not finite becomes ``null``."""
        line = json.dumps(nulled(row), allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("a+b") as file:
                file.write(b"\n" + line if _is_cut(file) else line)
        except OSError as error:
            if not self._failing:
                log.warning("%s: rows are lost, training continues: %s", self.path, error.strerror)
            self._failing = True
        else:
            self._failing = False

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        """Remove the other rows, or none of them if the disk has an error."""
        try:
            with self.path.open("rb") as file:  # not read_rows: one that cannot be read is not empty
                rows = [row for line in file if (row := _parsed(line)) is not None]
            kept = [json.dumps(row) + "\n" for row in rows if wanted(row)]
            with replacing(self.path) as new:
                new.write_text("".join(kept), encoding="utf-8")
        except OSError as error:
            log.warning("%s: no row is removed, training continues: %s", self.path, error.strerror)


def nulled(value: Any) -> Any:
    """A JSON value that every parser reads: ``null`` for each number in ``value`` that is not finite."""
    if isinstance(value, dict):
        return {key: nulled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [nulled(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_cut(file: BinaryIO) -> bool:
    """Is the last line incomplete? A full disk or a kill may have cut it."""
    end = file.seek(0, 2)
    if not end:
        return False
    file.seek(end - 1)
    return file.read(1) != b"\n"


def _parsed(line: bytes) -> Row | None:
    """``None`` unless ``line`` is a JSON object. A truncated object never is one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
