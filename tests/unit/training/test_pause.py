"""When a peer pauses: its hours, its requests, and what ``noloco-peer pause`` says when no peer takes one."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from peer import clock
from peer.commands import pause as command
from peer.commands.cli import main
from peer.config.load import load
from peer.errors import RunError, UserError
from peer.process import Pause
from peer.training.pausing.requests import REQUEST, REQUEST_PERIOD, PauseRule, ask, take, watching
from peer.training.run_folder import LOCK, claim
from tests.swarm.support.harness import DEMO, wait_for

NIGHT = "20:00-08:00"


def at(text: str) -> int:
    hour, minute = text.split(":")
    return 60 * int(hour) + int(minute)


@pytest.mark.parametrize(
    ("hours", "trains", "pauses"),
    [
        (NIGHT, ["20:00", "23:59", "00:00", "07:59"], ["08:00", "12:00", "19:59"]),
        ("09:30-17:00", ["09:30", "16:59"], ["09:29", "17:00", "00:00"]),
        ("00:00-23:59", ["00:00", "23:58"], ["23:59"]),
        (None, ["00:00", "12:00"], []),
    ],
)
def test_hours_go_over_midnight(hours: str | None, trains: list[str], pauses: list[str]) -> None:
    assert [PauseRule(hours).paused(at(it), None) for it in trains] == [False] * len(trains)
    assert [PauseRule(hours).paused(at(it), None) for it in pauses] == [True] * len(pauses)


def test_what_a_person_says_holds_until_the_next_border() -> None:
    rule = PauseRule(NIGHT)
    said: list[tuple[str, Any, bool]] = [
        ("12:00", None, True),
        ("12:01", "resume", False),  # by day
        ("19:59", None, False),
        ("20:00", None, False),
        ("21:00", "pause", True),  # by night
        ("07:59", None, True),
        ("08:00", None, True),
        ("20:00", None, False),  # the border ended the request
        ("21:00", "pause", True),
        ("21:01", "resume", False),
        ("08:00", None, True),
    ]
    assert [rule.paused(at(time), request) for time, request, _ in said] == [paused for *_, paused in said]


def test_without_hours_a_request_holds_until_the_next_one() -> None:
    rule = PauseRule(None)
    assert rule.paused(0, "pause") and rule.paused(1439, None) and rule.paused(0, None)
    assert not rule.paused(5, "resume") and not rule.paused(6, None)


@pytest.mark.parametrize(
    "hours", ["8-20", "20:00", "24:00-08:00", "20:00-08:60", "20:00-08:00,1", "20:00-20:00", "x", 5]
)
def test_other_hours_are_refused_in_one_line(hours: Any) -> None:
    with pytest.raises(UserError, match=r"peer\.hours") as refused:
        load([DEMO], [f"peer.hours={hours}"])
    assert "\n" not in str(refused.value)


def test_hours_are_read_from_a_file_as_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("peer:\n  hours: 20:00-08:00\n")
    assert load([DEMO, tmp_path / "own.yaml"], []).peer.hours == NIGHT


def test_requests_are_taken_and_what_lies_there_from_before_is_not(tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_text("pause")
    pause = Pause()
    with watching(tmp_path, None, pause):
        assert not pause.requested
        assert ask(tmp_path, "pause", 5)
        wait_for(lambda: pause.requested, 5)
        assert ask(tmp_path, "resume", 5)
        wait_for(lambda: not pause.requested, 5)
        (tmp_path / REQUEST).write_bytes(b"\xff" * 10_000)
        wait_for(lambda: not (tmp_path / REQUEST).exists(), 5)
        assert not pause.requested
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", [0o027, 0o077])
def test_a_request_of_root_can_be_read_by_the_peer(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer of another user removed it unread, and ``pause`` said that it frees the GPU."""
    modes: list[int] = []
    monkeypatch.setattr(clock, "sleep", lambda _: modes.append((tmp_path / REQUEST).stat().st_mode & 0o777))
    before = os.umask(umask)
    try:
        ask(tmp_path, "pause", 2 * REQUEST_PERIOD)
    finally:
        os.umask(before)
    assert modes == [0o644, 0o644]


def test_a_signal_while_the_watch_begins_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a signal raises wherever the main thread is; the executor waits for its thread at its end."""
    ended = threading.Event()

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *work: object) -> NoReturn:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr(clock, "event", lambda: ended)
    monkeypatch.setattr(clock, "worker", lambda name: Interrupted(1))
    with pytest.raises(KeyboardInterrupt), watching(tmp_path, None, Pause()):
        pass
    assert ended.is_set()


def test_outside_of_its_hours_a_peer_is_paused_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [datetime(2026, 1, 1, 12, 0)]
    monkeypatch.setattr(clock, "unix", lambda: now[0].timestamp())  # of local time
    pause = Pause()
    with watching(tmp_path, NIGHT, pause):
        assert pause.requested
        now[0] = datetime(2026, 1, 2, 0, 0)
        wait_for(lambda: not pause.requested, 5)


@pytest.mark.parametrize(("zone", "said"), [("UTC-5:30", "UTC (UTC+0530)"), ("", "UTC (UTC+0000)")])
def test_the_zone_of_the_hours_is_said(
    zone: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container has UTC, so its peer trained at other hours than those of its machine, and nothing said so."""
    with monkeypatch.context() as environment:
        environment.setenv("TZ", zone)
        time.tzset()
        for hours in (NIGHT, None):
            with caplog.at_level(logging.INFO), watching(tmp_path, hours, Pause()):
                pass
    time.tzset()
    assert caplog.text.count("zone") == 1 and f"{NIGHT}, by the clock of the zone {said}" in caplog.text


@contextmanager
def running(run_dir: Path, name: str) -> Iterator[Path]:
    folder = claim(run_dir, name)
    try:
        yield folder.path
    finally:
        folder.release()


def test_a_name_or_a_folder_finds_the_peer_and_others_are_refused_in_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    with running(tmp_path, "ann") as folder, watching(folder, None, pause := Pause()):
        command.run("ann", tmp_path, "pause", said.append)
        wait_for(lambda: pause.requested, 5)
        command.run(str(folder), Path("elsewhere"), "resume", said.append)
        wait_for(lambda: not pause.requested, 5)
        with pytest.raises(UserError, match=r"bob: no such peer.*ann run there"):
            command.run("bob", tmp_path, "pause", said.append)
    assert len(said) == 2 and all("ann" in line for line in said)
    with pytest.raises(UserError, match="ann: no peer runs there"):
        command.run("ann", tmp_path, "pause", said.append)
    assert not (tmp_path / "bob").exists() and not (tmp_path / "ann" / REQUEST).exists()


def test_run_dir_comes_from_the_environment_as_for_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOLOCO_RUN_DIR", str(tmp_path))
    with running(tmp_path, "ann") as folder, watching(folder, None, pause := Pause()):
        with pytest.raises(SystemExit) as ended:
            main(["pause", "ann"])
        wait_for(lambda: pause.requested, 5)
    assert ended.value.code == 0


def test_a_peer_that_takes_no_requests_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TAKEN_SECONDS", 0.5)
    with running(tmp_path, "ann") as folder, pytest.raises(RunError, match="does not take requests"):
        command.run("ann", tmp_path, "pause", print)
    assert not (folder / REQUEST).exists()  # it is not found later


def test_the_lock_is_that_of_the_running_peer(tmp_path: Path) -> None:
    with running(tmp_path, "ann") as folder:
        assert take(folder) is None
        lock = os.open(folder / LOCK, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(lock)
