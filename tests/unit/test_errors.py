"""Errors are one line, whoever wrote their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dht_bootstrap import cli
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
