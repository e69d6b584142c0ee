"""The ruler of the wan benchmark: what is an inner step, waiting, the end of a run, and a goal missed."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from peer.errors import UserError
from tests.benchmarks.common import Known
from tests.benchmarks.wan import goals, pacer
from tests.benchmarks.wan.comparison import compare, result
from tests.benchmarks.wan.figures import figures
from tests.benchmarks.wan.processes import PeerRun
from tests.benchmarks.wan.reference import fragments
from tests.benchmarks.wan.runs import Runs
from tests.benchmarks.wan.stages import METHODS, stages
from tests.unit import parts

PACE = 0.5
QUICK = stages(quick=True)


class Clock:
    """Stands still but for sleeps, which end ``late``."""

    def __init__(self) -> None:
        self.now, self.late = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacer, "time", clock)
    return clock


def step(it: pacer.Pacer, clock: Clock, *, compute: float = 0.1, wait: float = 0.0) -> None:
    it.begin()
    clock.now += compute
    it.computed()
    clock.now += wait
    it.updates()
    it.end()


def told(it: pacer.Pacer, file: Path) -> dict[str, Any]:
    it.over()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_step_takes_its_set_time_however_late_the_machine_wakes_it(clock: Clock, tmp_path: Path) -> None:
    it = pacer.Pacer(PACE, file := tmp_path / "pacer.json")
    it.end()  # an update before the first step
    clock.late = 0.02
    for _ in range(10):
        step(it, clock)
    found = told(it, file)
    assert found["over"] - found["first"] == pytest.approx(10 * PACE + 0.02)
    assert (len(found["ends"]), found["overran"]) == (10, 0) and found["work"] == pytest.approx(10 * 0.1)


def test_the_time_between_steps_and_before_an_update_is_no_steps(clock: Clock, tmp_path: Path) -> None:
    it = pacer.Pacer(PACE, file := tmp_path / "pacer.json")
    for _ in range(4):
        step(it, clock, wait=0.3)
        clock.now += 0.2
    found = told(it, file)
    assert found["over"] - found["first"] == pytest.approx(4 * (PACE + 0.3 + 0.2))
    assert found["overran"] == 0 and found["work"] == pytest.approx(4 * 0.1)


def test_a_step_that_overran_is_counted_and_made_good_by_the_next(clock: Clock, tmp_path: Path) -> None:
    it = pacer.Pacer(PACE, file := tmp_path / "pacer.json")
    step(it, clock, compute=0.7)
    step(it, clock)
    found = told(it, file)
    assert found["overran"] == 1 and found["over"] - found["first"] == pytest.approx(2 * PACE)


def peer_run(stage: Any, *, pace: float, waits: float, sent: int = 0) -> PeerRun:
    """A peer that has waited for ``waits`` seconds, the last of them after its last inner step."""
    ends = [(number + 1) * pace + waits - 1 for number in range(stage.steps)]
    told = {"pace": pace, "first": 0.0, "over": ends[-1] + 1, "ends": ends, "losses": [2.0] * stage.steps}
    told |= {"work": 0.1 * stage.steps * pace, "overran": 0, "val_loss": 2.0, "merged": 3, "rounds": 4}
    return PeerRun(told, ends[-1] + 3, sent)


def test_figures_are_those_of_the_faster_peers_but_the_bytes() -> None:
    stage = QUICK["home_straggler"]
    fast = [peer_run(stage, pace=stage.pace, waits=3.0, sent=100) for _ in range(2)]
    found = figures(stage, [*fast, peer_run(stage, pace=2 * stage.pace, waits=30.0, sent=400)])
    wall = stage.steps * stage.pace + 3
    assert found["wall_seconds"] == pytest.approx(wall) and found["idle_share"] == pytest.approx(3 / wall)
    assert (found["exchange_end_seconds"], found["end_seconds"]) == (pytest.approx(1), pytest.approx(3))
    assert (found["wire_bytes"], found["merged_share"]) == (200, 0.75)
    with pytest.raises(RuntimeError, match="0 of 60 steps"):
        figures(stage, [PeerRun({**fast[0].pacer, "ends": []}, 0.0, 0)] * 3)


def entry(stage: str, method: str, **figures: float) -> dict[str, Any]:
    values = {"end_seconds": 9.0, "exchange_end_seconds": 0.5, "idle_share": 0.0, "wire_bytes": 1e6, "losses": []}
    values["merged_share"] = 1.0
    return {**values, **figures, "settings": json.loads(json.dumps(QUICK[stage].settings(METHODS[method])))}


def known(folder: Path, entries: dict[str, Any]) -> Known:
    """Full runs, as of a file without a word about it."""
    (folder / "wan.runs.json").write_text(json.dumps(entries))
    return Known("wan", Namespace(json=folder / "wan.json", quick=False))


def test_what_misses_a_goal_is_said_with_its_stage(tmp_path: Path) -> None:
    swap = {"payload_bytes": 1e6, "swap_bytes": 1e6}
    entries = {
        "home/alone/0": entry("home", "alone", wall_seconds=100.0, end_seconds=30.0),
        "home/noloco_default/0": entry("home", "noloco_default", wall_seconds=101.0, **swap),
        "home_straggler/noloco_default/0": entry(
            "home_straggler", "noloco_default", wall_seconds=103.0, exchange_end_seconds=0.5 + 3 * 0.86, **swap
        ),
    }
    runs = Runs(known(tmp_path, entries), QUICK)
    table = result(runs, QUICK)
    assert table["wall_ratio"]["home_straggler"]["noloco_default"] == pytest.approx(1.03)
    assert table["end_swaps"]["home_straggler"]["noloco_default"] == pytest.approx(3)  # 8 Mbit at 10 Mbit/s, and 60 ms
    assert [line.split(":")[:2] for line in goals.missed(table)] == [
        ["home_straggler", " wall seconds over those of computing alone"],
        ["home_straggler", " swaps that the end of a run takes"],
    ]
    assert "alone" in compare(runs, QUICK["home"])


def test_runs_with_other_settings_are_refused(tmp_path: Path) -> None:
    found = known(tmp_path, {"home/alone/0": entry("home", "alone", wall_seconds=1.0)})
    assert Runs(found, QUICK).of("home", "alone")
    with pytest.raises(UserError, match="home/alone/0 was made with other settings"):
        Runs(found, stages(quick=False))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fragments_have_each_weight_once(count: int) -> None:
    model: Any = parts.peer_state().inner.model
    found = [it for part in fragments(model, count) for it in {id(w): w for w in part.parameters()}.values()]
    assert {id(it) for it in found} == {id(it) for it in model.parameters()}
    assert sum(it.numel() for it in found) == sum(it.numel() for it in model.parameters())
