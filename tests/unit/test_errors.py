"""Errors are one line, whoever wrote their text."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from dht_bootstrap import cli
from peer import logs
from peer.commands import cli as peer_cli
from peer.errors import RunError, UserError, one_line, print_error


def test_a_text_of_several_lines_becomes_one() -> None:
    assert one_line(ValueError("first\n  second\r\nthird ")) == "first second third"
    assert one_line(ValueError("x" * 500), 200) == "x" * 200
    assert one_line(TimeoutError(), 200) == "TimeoutError"
    assert one_line(ValueError("a \x1b[2J\u202e\x00")) == r"a \x1b[2J\u202e\x00"  # what a peer has sent


@pytest.mark.parametrize(("error", "code"), [(UserError("a\nb"), 2), (RunError("a\nb"), 1)])
def test_a_command_says_it_in_one_line(
    capsys: pytest.CaptureFixture[str], error: UserError | RunError, code: int
) -> None:
    assert print_error(error) == code
    assert capsys.readouterr().err == "error: a b\n"


@pytest.mark.parametrize("main", [peer_cli.main, cli.main])
def test_a_level_of_logging_that_there_is_not(
    main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOLOCO_LOG_LEVEL", "verbose")
    with pytest.raises(SystemExit) as ended:
        main(["revoke", "peer-1", "--owner", "of"] if main is cli.main else ["show-config", "--config", "nowhere.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: NOLOCO_LOG_LEVEL: verbose is none of DEBUG, INFO")


def test_the_bootstrap_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["revoke", "peer-1", "--owner", f"{tmp_path}/of\nnobody.pem"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def barred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user may not enter; root may enter each."""
    folder, stat = tmp_path / "barred", Path.stat

    def of_another_user(path: Path, **options: bool) -> os.stat_result:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    folder.mkdir()
    monkeypatch.setattr(Path, "stat", of_another_user)
    return folder


COMMANDS = [
    (peer_cli.main, ["export", "{}/peer-1", "{}/out"]),
    (peer_cli.main, ["tokenize", "pyproject.toml", "{}/out", "--tokenizer", "{}/tokenizer.json"]),
    (
        peer_cli.main,
        ["check", "--config", "configs/demo.yaml", "--set", "run.model={{name: auto, source: {}/it}}"],
    ),
    (peer_cli.main, ["status", "/ip4/127.0.0.1/tcp/1/p2p/QmA", "--invitation", "{}/invitation"]),
    (cli.main, ["revoke", "peer-1", "--owner", "{}/owner.key"]),
]


@pytest.mark.parametrize(("main", "words"), COMMANDS, ids=[it[1][0] for it in COMMANDS])
def test_a_folder_that_this_user_may_not_enter_is_a_line(
    main: Callable[[list[str]], None], words: list[str], barred: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Python 3.14 ``Path.exists`` raises for it, and the commands ended in a traceback."""
    with pytest.raises(SystemExit) as ended:
        main([word.format(barred) for word in words])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: ") and f"{barred}/" in said and "Permission denied" in said


@pytest.mark.parametrize("main", [peer_cli.main, cli.main])
def test_what_is_denied_and_is_no_file_is_no_mistake_of_a_user(
    main: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "setup", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    with pytest.raises(PermissionError):
        main(["revoke", "peer-1", "--owner", "of"] if main is cli.main else ["show-config", "--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--http-port", "94000"], "argument --http-port: from 0 to 65535"),
        (["--port", "313370"], "argument --port: from 0 to 65535"),
        (["--port", "-1"], "argument --port: from 0 to 65535"),
        (["--host", "localhost"], "argument --host: 'localhost' is not an IPv4 address"),
    ],
)
def test_an_option_of_the_bootstrap_that_cannot_be_is_told_before_the_work(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Some were a traceback, others exit code 1: systemd started the node again and again."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--identity", f"{tmp_path}/none/\0.key"])
    assert ended.value.code == 2 and says in capsys.readouterr().err
