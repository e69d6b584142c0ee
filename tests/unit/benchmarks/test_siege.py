"""The table of attacks, the goals, and that a file of results keeps runs of one kind only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.siege import __main__ as siege
from tests.benchmarks.siege import member, requests, streams
from tests.benchmarks.siege.attacks import ATTACKS, QUICK

MADE = {"commit": "abc", "seconds": 60.0, "peers": 6, "quick": False}
GOOD: dict[str, Any] = {
    **{"died": 0, "merged_before": 1.0, "merged_during": 0.9, "rss_growth_mib": 64.0, "joined_seconds": 30.0},
    **{"loss_ratio": 1.05, "monitor": True, "forged_lines": 0},
}
LIES = {"boast", "false donor", "drowned", "silent", "no-show", "false mean"}  # of tests/simulated/harm/lies.py


def test_every_attack_has_a_program_and_every_program_its_attack() -> None:
    named = {kind: {name for name, it in ATTACKS.items() if it.program == kind} for kind in ("outsider", "member")}
    assert named["outsider"] == {*requests.REQUESTS, "providers", "streams", "relay", "half_open"}
    assert all(hasattr(requests.Attacker, name) for name in requests.REQUESTS)
    assert all(hasattr(streams, name) for name in named["outsider"] - {*requests.REQUESTS, "half_open"})
    assert named["member"] == {*LIES, *member.INSTEAD, "uphill", "tokens"}
    assert set(QUICK) <= set(ATTACKS)


def test_every_threat_of_a_running_swarm_has_an_attack() -> None:
    """Of the twenty."""
    threats = {int(number) for it in ATTACKS.values() for number in it.threat.split(", ") if number.isdigit()}
    assert threats == set(range(1, 21))


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, 0),
        ({"died": 1}, 1),
        ({"merged_during": 0.89}, 1),
        ({"rss_growth_mib": 64.1}, 1),
        ({"joined_seconds": None}, 1),
        ({"joined_seconds": 30.1}, 1),
        ({"loss_ratio": 1.06}, 1),
        ({"loss_ratio": None, "merged_during": 0.0}, 2),  # no round has ended
        ({"monitor": False, "forged_lines": 1}, 2),
    ],
)
def test_a_missed_goal_is_named_and_decides_the_exit_code(
    changed: dict[str, Any], missed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        siege._finish({"nested, open": GOOD | changed}, check=True)
    assert ended.value.code == (1 if missed else 0)
    assert capsys.readouterr().out.count("nested, open: not ") == missed


@pytest.mark.parametrize("changed", [{"quick": True}, {"seconds": 20.0}, {"commit": "def"}])
def test_runs_of_another_kind_or_commit_are_never_mixed(tmp_path: Path, changed: dict[str, Any]) -> None:
    file = tmp_path / "siege.json"
    assert siege._known(file, MADE, tuple(MADE)) == {}
    found = {"nested, open": {**GOOD, "made_by": MADE}}
    file.write_text(json.dumps({"attacks": found}))
    assert siege._known(file, MADE, tuple(MADE)) == found
    with pytest.raises(SystemExit, match="name another file"):
        siege._known(file, MADE | changed, tuple(MADE))
