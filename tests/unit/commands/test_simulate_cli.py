"""``noloco-peer simulate`` from the command line: what it writes, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.commands.cli import main
from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.simulation import Simulation
from peer.data.tokenizer import SEPARATOR
from tests.unit.commands.simulate_harness import config
from tests.unit.data.harness import text_with_a_set

ROOT = Path(__file__).parents[3]
TINY = [
    *("run.model.hidden_size=16", "run.model.intermediate_size=32", "run.model.layers=1", "run.model.heads=2"),
    *(
        "run.data.sequence_length=16",
        "run.batch_size=2",
        "run.evaluation.batches=2",
        "run.steps=8",
        "run.inner_steps=4",
    ),
]
SUMMARY_SWARM = {
    *("method", "peers", "tokens", "val_loss_mean", "val_loss_worst", "val_loss_averaged_model", "spread"),
    *("idle_share", "bytes_sent", "wall_seconds"),
}


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line sets up the whole process' logging, on a stream that is gone after the test."""
    monkeypatch.setattr("peer.logs.setup", lambda *arguments: None)


def simulate(folder: Path, *arguments: str) -> int:
    sets = [word for override in (*TINY, f"run.dir={folder}") for word in ("--set", override)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--config", str(ROOT / "configs" / "demo.yaml"), *sets, *arguments])
    return int(ended.value.code or 0)


def test_it_writes_a_summary_with_the_promised_keys_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, "--replicas", "3", "--method", "diloco", "--drop", "0.2", "--speeds", "1", "0.5") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["swarm"]) == SUMMARY_SWARM
    assert summary["swarm"]["method"] == "diloco"
    assert set(summary["peers"]) == {"replica-0", "replica-1", "replica-2"}
    assert (tmp_path / "simulation.png").stat().st_size > 10_000
    assert simulate(tmp_path, "--replicas", "2") == 0  # a second one overwrites nothing
    (aside,) = tmp_path.glob("before-*")
    assert json.loads((aside / "summary.json").read_text()) == summary
    said = capsys.readouterr().out
    assert "demo: diloco, 3 replicas" in said and "validation loss" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "1"], "--replicas 1: a simulation needs 2 to 64"),
        (["--replicas", "4", "--drop", "2"], "--drop 2: it is a share, 0 to 1"),
        (["--replicas", "4", "--set", "run.outer.gamma=1.9"], "0 < gamma < 2(1 - alpha^2)"),
        (["--replicas", "4", "--set", "run.outer={name: diloco, momentum: 1.0}"], "run.outer.momentum"),
        (["--replicas", "4", "--set", "run.outer={name: decoupled, density: 0}"], "run.outer.density"),
        (["--replicas", "4", "--method", "noloko"], "invalid"),
        (["--replicas", "4", "--network", "--drop", "0.1"], "--network models time only: --drop does not fit"),
        (["--replicas", "4", "--network", "--swap-steps", "3"], "--swap-steps does not fit"),
        (["--replicas", "4", "--network", "--workers", "1000"], "--workers does not fit"),
        (["--replicas", "4", "--up-mbit", "3"], "--up-mbit is for the model of time: add --network"),
        (["--replicas", "4", "--loss", "0.1"], "--loss is for the model of time"),
        (["--replicas", "4", "--rounds", "3"], "--rounds is for the model of time"),
        (["--replicas", "many"], "invalid int"),
    ],
)
def test_a_mistake_is_exit_code_2_and_says_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert simulate(tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert simulate(tmp_path / "file", "--replicas", "2") == 2
    said = capsys.readouterr()
    assert said.out == "" and "run.dir: cannot write to" in said.err


def test_a_loss_that_is_not_finite_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = ["run.inner.learning_rate=1e30", "run.inner.warmup_steps=0", "run.inner.clip_norm=1e30"]
    sets = [word for override in hot for word in ("--set", override)]
    assert simulate(tmp_path, "--replicas", "2", *sets) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: replica-") and "nothing was averaged from it" in error and "Traceback" not in error


def test_it_neither_trains_nor_validates_on_a_further_set(tmp_path: Path) -> None:
    chosen = config(**text_with_a_set(tmp_path))
    (path,) = chosen.run.evaluation.sets["more"]
    text = Simulation(chosen, Options(replicas=2, method=Method.NOLOCO))._text
    assert {*map(chr, {*text.in_memory, *text.validation} - {SEPARATOR})} == {*"ABC"} - {Path(path).name}
