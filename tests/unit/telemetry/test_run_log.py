"""What a reader takes from a file that is being written to, that a kill has cut short, or that is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.telemetry.run_log import RunLog, read_rows

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
        assert seen == log.rows == ROWS[: len(seen)]
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
    assert log.poll() == log.rows == [{"round": 7}]
