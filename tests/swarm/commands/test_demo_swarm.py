"""``noloco-peer swarm``: from start to summary, interruptions, and members that are killed."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.swarm.support.harness import DEMO, TINY, Process, Swarm, wait_for

SUMMARY_PEER = {
    *("steps", "tokens", "first_train_loss", "last_train_loss", "val_loss", "rounds", "idle_share", "partners"),
    *("bytes_sent", "bytes_received"),
}
SUMMARY_SWARM = {
    *("method", "peers", "tokens", "val_loss_mean", "val_loss_worst", "val_loss_averaged_model", "spread"),
    *("idle_share", "bytes_sent", "wall_seconds"),
}


def launch(swarm: Swarm, peers: int, *sets: str, name: str = "swarm", resume: bool = False) -> Process:
    overrides = [word for override in (*TINY, f"run.dir={swarm.folder}/runs", *sets) for word in ("--set", override)]
    options = ["--resume"] if resume else []
    return swarm.start(
        name, ["-m", "peer", "swarm", "--peers", str(peers), "--config", str(DEMO), *overrides, *options]
    )


def rounds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_page(process: Process) -> None:
    """Wait until the bootstrap node answers at the page's address in the output."""
    page = process.line(r"the swarm as a page: (\S+)")[1]
    assert process.line(r"noloco-peer join (\S+)")[1].startswith("/ip4/127.0.0.1/tcp/")

    def healthy() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{page}healthz", timeout=10) as answer:
            return bool(answer.status == 200)
        return False

    wait_for(healthy, 30)


@pytest.mark.smoke
@pytest.mark.cold
def test_four_peers_train_together_and_leave_no_processes(swarm: Swarm) -> None:
    process = launch(swarm, 4, "run.steps=720", "run.inner_steps=60", "run.evaluation.every_rounds=6")
    process.line(r"round=2 ", 90)
    swarm.note_children()
    assert process.exit_code(120) == 0, process.output()
    runs = swarm.folder / "runs"
    summary = json.loads((runs / "summary.json").read_text())
    assert summary["swarm"].keys() == SUMMARY_SWARM
    assert summary["swarm"]["peers"] == 4
    for name, row in summary["peers"].items():
        assert row.keys() >= SUMMARY_PEER
        assert len(row["partners"]) >= 2, f"{name} met {row['partners']}"
        assert row["val_loss"] < row["first_val_loss"] - 1
        assert row["steps"] == 720
        done = len(rounds(runs / name))  # eleven full phases; 30, 15, 8 and 7 steps; at most two without steps
        assert 15 <= done <= 17 and sum(row["rounds"].values()) == done
        assert f"peer={name} round=15 step=720" in process.output()  # without a terminal: a line per round
    assert swarm.left_over() == []
    assert "Traceback" not in "".join(log.read_text() for log in runs.rglob("console.log"))


def test_ctrl_c_saves_and_a_resume_continues(swarm: Swarm) -> None:
    sets = ("run.steps=100000", "run.inner_steps=300")
    process = launch(swarm, 2, *sets)
    process.line(r"peer=peer-0 round=1 ", 90)
    process.line(r"peer=peer-1 round=1 ", 90)
    swarm.note_children()
    process.signal(signal.SIGINT)
    assert process.exit_code(60) == 0, process.output()
    assert swarm.left_over() == []
    runs = swarm.folder / "runs"
    before = {name: rounds(runs / name)[-1]["step"] for name in ("peer-0", "peer-1")}
    for name in before:
        assert (runs / name / "checkpoints" / "latest").exists()

    again = launch(swarm, 2, *sets, name="again", resume=True)
    again.line(rf"peer=peer-0 round=\d+ step={before['peer-0'] + 300} ", 90)
    wait_for_page(again)
    again.signal(signal.SIGTERM)
    assert again.exit_code(60) == 0, again.output()


def test_a_second_run_keeps_the_folder_of_the_first(swarm: Swarm) -> None:
    sets = ("run.steps=20", "run.inner_steps=10")
    assert launch(swarm, 1, *sets).exit_code(90) == 0
    first = (swarm.folder / "runs" / "summary.json").read_text()
    assert launch(swarm, 1, *sets, name="second").exit_code(90) == 0
    (aside,) = (swarm.folder / "runs").glob("before-*")
    assert (aside / "summary.json").read_text() == first
    assert rounds(aside / "peer-0")[-1]["step"] == 20


def test_members_end_when_the_command_itself_is_killed(swarm: Swarm) -> None:
    process = launch(swarm, 2, "run.steps=100000", "run.inner_steps=40")
    process.line(r"round=1 ", 90)
    swarm.note_children()
    process.signal(signal.SIGKILL)
    process.exit_code(10)
    wait_for(lambda: not swarm.left_over(), 30, lambda: str(swarm.left_over()))


def member(process: Process, word: str) -> psutil.Process:
    """The child of the swarm command that has ``word`` in its command line."""
    children = psutil.Process(process.pid).children()
    return next(child for child in children if any(word in part for part in child.cmdline()))


def test_members_that_are_killed_are_restarted_and_continue(swarm: Swarm) -> None:
    sets = ("run.steps=1000000", "run.inner_steps=100", "peer.checkpoint.every_rounds=2")
    process = launch(swarm, 2, *sets)
    process.line(r"peer=peer-1 round=5 ", 90)
    member(process, "peer.name=peer-1").kill()
    process.line(r"peer-1 was killed by signal 9; started again \(1 of", 30)
    process.line(r"(?s)started again .*peer=peer-1 round=\d+ [^\n]*outcome=merged", 90)
    member(process, "dht_bootstrap").kill()
    process.line(r"bootstrap was killed by signal 9; started again \(1 of", 30)
    process.line(r"(?s)bootstrap was .*peer=peer-1 round=\d+ [^\n]*outcome=merged", 60)
    wait_for_page(process)  # at the same address
    swarm.note_children()
    process.signal(signal.SIGINT)
    assert process.exit_code(60) == 0, process.output()
    assert rounds(swarm.folder / "runs" / "peer-1")[-1]["round"] > 4
    assert "Traceback" not in process.output()
    wait_for(lambda: not swarm.left_over(), 30, lambda: str(swarm.left_over()))
