"""A log has one line for each event, whatever a message quotes."""

from __future__ import annotations

import io
import logging
import os
import threading
from pathlib import Path

import pytest

from peer import logs
from peer.p2p.greeting import MemberIdentity
from peer.p2p.stream import Refusal, Refused

FORGED = "a\n2026-01-01 00:00:00.000 INFO peer=a round=9\r\x1b[2J\x9b1m\u202e\u2028\x00 b"
ESCAPED = r"a\n2026-01-01 00:00:00.000 INFO peer=a round=9\r\x1b[2J\x9b1m\u202e\u2028\x00 b"


def test_what_a_message_quotes_cannot_end_its_line_or_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peer.log"
    with logs.attached("me", file):
        logs.get_logger("test").warning("donor failed: %s", logs.fields(peer=FORGED, reason="β ok"))
    (line,) = file.read_text(encoding="utf-8").split("\n")[:-1]
    assert line.endswith(f" peer=me donor failed: peer={ESCAPED} reason=β ok")


def test_nor_in_the_log_of_a_program_with_its_own_loop(tmp_path: Path) -> None:
    theirs, said = logging.getLogger(), io.StringIO()
    handler = logging.StreamHandler(said)
    theirs.addHandler(handler)
    try:
        with logs.attached("me", tmp_path / "peer.log"):
            logs.get_logger("test").warning("no answer: %s", FORGED)
    finally:
        theirs.removeHandler(handler)
    assert said.getvalue() == f"no answer: {ESCAPED}\n"


def test_why_a_peer_refuses_is_one_line(tmp_path: Path) -> None:
    """Its whole answer is its own; ``run`` is read as a configuration."""
    file, me = tmp_path / "peer.log", MemberIdentity("me", "demo", "c", "{}", "layout")
    with logs.attached("me", file):
        me.warn_of(FORGED, Refused(Refusal(reason="other", run='{"\\n\\u202e": "\\u001b[2J"}')))
    (line,) = file.read_text(encoding="utf-8").split("\n")[:-1]
    assert line.isprintable()


def test_a_wrong_call_ends_no_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(logs.LOGGER), "propagate", False)  # pytest's own handler raises
    with logs.attached("me", tmp_path / "peer.log"):
        logs.get_logger("test").warning("%d", "x")  # noqa: PLE1205, RUF100
    assert "TypeError" in capsys.readouterr().err  # logging's own report


def test_a_logger_escapes_once() -> None:
    assert logs.get_logger("test") is logs.get_logger("test")
    assert len(logs.get_logger("test").filters) == 1


def test_the_last_of_several_peers_restores_the_logging_of_the_program(tmp_path: Path) -> None:
    root = logging.getLogger(logs.LOGGER)
    before = root.level, root.handlers[:]
    first, second = logs.attached("a", tmp_path / "a.log"), logs.attached("b", tmp_path / "b.log")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert root.level == logging.INFO
    second.__exit__(None, None, None)
    assert (root.level, root.handlers) == before


def test_what_a_thread_of_no_peer_says_is_in_the_log_of_each(tmp_path: Path) -> None:
    files = [tmp_path / "a.log", tmp_path / "b.log"]
    with logs.attached("a", files[0]), logs.attached("b", files[1]):
        helper = threading.Thread(target=logs.get_logger("test").info, args=("from a helper",))
        helper.start()
        helper.join()
        logs.get_logger("test").info("from b")
    assert [file.read_text().count("from a helper") for file in files] == [1, 1]
    assert [file.read_text().count("from b") for file in files] == [0, 1]


def test_a_full_disk_is_one_line_until_there_is_room_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line that was lost printed a stack."""
    with logs.attached("me", Path("/dev/full")):
        (file,) = (it for it in logging.getLogger(logs.LOGGER).handlers if isinstance(it, logging.FileHandler))
        for _ in range(3):
            logs.get_logger("test").warning("x" * 5000)
        assert capsys.readouterr().err == "/dev/full: lines are lost until it can be written: No space left on device\n"
        full = file.setStream((tmp_path / "peer.log").open("w"))
        logs.get_logger("test").warning("there is room")
        room = file.setStream(full)
        logs.get_logger("test").warning("no more")
    assert room is not None
    room.close()
    assert (tmp_path / "peer.log").read_text().endswith("there is room\n")
    assert capsys.readouterr().err.count("/dev/full: lines are lost") == 1


def test_nobody_waits_for_a_terminal_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network thread did; after seconds the peer ended without its last steps."""
    reader, writer = os.pipe()
    monkeypatch.setattr(logs, "TAKES_SECONDS", 0.1)
    stream = os.fdopen(writer, "w", encoding="utf-8")
    handler = logs.StderrLog(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    thread = threading.Thread(target=lambda: [handler.emit(record) for record in [said] * 9999], daemon=True)
    said = logging.makeLogRecord({"msg": "no %s", "args": ("meeting",), "levelname": "INFO"})
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
    os.set_blocking(reader, False)
    taken = os.read(reader, 1 << 20).decode().splitlines()
    handler.emit(said)
    assert set(taken) == {"INFO no meeting"} and len(taken) < 9999
    lost, last = os.read(reader, 1 << 20).decode().splitlines()
    assert last == "INFO no meeting" and lost.endswith(f" lines left out, as nothing read them: {9999 - len(taken)}")
    stream.close()
    os.close(reader)
