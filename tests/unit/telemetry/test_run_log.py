"""What a reader takes from a file that is being written to, that a kill has cut short, or that is damaged."""

from __future__ import annotations

import errno
import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.telemetry.run_log import RowWriter, RunLog, read_rows

ROWS = [{"round": number, "partner": "ü" * number, "idle": 0.1 * number} for number in range(4)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "rounds.jsonl") == read_rows(tmp_path) == []


@given(st.lists(st.integers(0, len(TEXT)), max_size=8).map(sorted))
def test_a_file_that_grows_by_any_pieces_has_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("log") / "rounds.jsonl"
    log, seen = RunLog(path), []
    for cut in [*cuts, len(TEXT)]:
        path.write_bytes(TEXT[:cut])
        seen += log.poll()
        assert seen == ROWS[: len(seen)] and not log.anew
    assert seen == ROWS


@pytest.mark.parametrize("broken", [b'{"round": 3, "ste\n', b"\0\0\0\n", b"[1]\n", b"\xff\xfe\n", b"a\rb\n", b"\n"])
def test_what_is_no_object_is_left_out(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(broken + TEXT + broken + TEXT + broken[:-1])
    assert read_rows(path) == [*ROWS, *ROWS]


def test_a_file_that_has_become_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(TEXT)
    log = RunLog(path)
    log.poll()
    path.write_text('{"round": 7}\n')
    assert log.poll() == [{"round": 7}] and log.anew
    assert log.poll() == [] and not log.anew


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may become larger than ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_rows_and_warns_once_until_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RowWriter(tmp_path / "rounds.jsonl")
    writer.append(ROWS[0])
    for again in (1, 2):
        with full_disk(writer.path.stat().st_size + 10), caplog.at_level(logging.WARNING):
            writer.append(ROWS[1])
            writer.append(ROWS[2])
        assert [it.message.partition(": ")[2] for it in caplog.records] == again * [
            "rows are lost, training continues: File too large"
        ]
        writer.append(ROWS[3])  # after half a row
        assert read_rows(writer.path) == [ROWS[0], *again * [ROWS[3]]]


def test_a_full_disk_removes_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RowWriter(tmp_path / "rounds.jsonl")
    for row in ROWS:
        writer.append(row)
    with full_disk(50), caplog.at_level(logging.WARNING):
        writer.keep(lambda row: row["round"] < 3)
    assert read_rows(writer.path) == ROWS
    assert [it.name for it in tmp_path.iterdir()] == ["rounds.jsonl"]
    assert "no row is removed" in caplog.text
    writer.keep(lambda row: row["round"] < 3)
    assert read_rows(writer.path) == ROWS[:3]


def test_a_file_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its rows were removed when the peer resumed."""
    writer = RowWriter(tmp_path / "rounds.jsonl")
    writer.append(ROWS[0])
    whole = Path.open

    def broken(path: Path, mode: str = "r", *more: Any, **others: Any) -> Any:
        if mode == "rb":
            raise OSError(errno.EIO, "Input/output error")
        return whole(path, mode, *more, **others)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", broken)
        writer.keep(lambda _: True)
    assert read_rows(writer.path) == [ROWS[0]]
