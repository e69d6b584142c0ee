"""Results carry what made them, quick and full runs never mix, and a missed goal fails ``--check``."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import common
from tests.commit import commit


def namespace(file: Path | None, *, quick: bool = False, check: bool = False) -> Namespace:
    return Namespace(json=file, quick=quick, check=check)


def test_each_run_carries_its_commit_day_and_kind_and_is_not_made_again(tmp_path: Path) -> None:
    args = namespace(tmp_path / "it.json", quick=True)
    assert common.Known("it", args).get("one", lambda: {"seconds": 1.5}) == {"seconds": 1.5}
    again = common.Known("it", args)
    assert again.get("one", lambda: pytest.fail("it is known")) == {"seconds": 1.5}
    made = json.loads((tmp_path / "it.runs.json").read_text())["one"]["made_by"]
    assert made["commit"] == commit() != "" and made["date"] and made["quick"] is True


@pytest.mark.parametrize("quick", [False, True])
def test_quick_and_full_runs_do_not_mix(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "it.json"
    common.Known("it", namespace(file, quick=quick)).add("one", {"seconds": 1.5})
    with pytest.raises(SystemExit, match="name another file"):
        common.Known("it", namespace(file, quick=not quick))
    common.finish("it", {}, "words", namespace(file, quick=quick))
    other = [] if quick else ["--quick"]
    monkeypatch.setattr("sys.argv", ["it", "--json", str(file), *other])
    with pytest.raises(SystemExit, match="name another file"):
        common.options("it")


def test_old_results_are_full_unless_their_command_says_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "it.json"
    monkeypatch.setattr("sys.argv", ["it", "--json", str(file)])
    file.write_text(json.dumps({"made_by": {"command": "python -m it --json it.json"}}))
    assert common.options("it").json == file
    file.write_text(json.dumps({"made_by": {"command": "python -m it --quick"}}))
    with pytest.raises(SystemExit, match="it has quick runs"):
        common.options("it")


def test_a_missed_goal_is_said_and_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goals: dict[str, Any] = {"it is fast": True, "it is right": False}
    common.finish("it", {}, "words", namespace(tmp_path / "it.json"), goals)
    assert capsys.readouterr().out == "words\ngoal missed: it is right\n"
    with pytest.raises(SystemExit) as ended:
        common.finish("it", {}, "words", namespace(tmp_path / "it.json", check=True), goals)
    assert ended.value.code == 1
    assert (tmp_path / "it.json").exists(), "the figures are kept"
    common.finish("it", {}, "words", namespace(None, check=True), {"it is fast": True})
