"""``noloco-peer simulate`` from the command line: what it writes, how it says no, and how it is stopped."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from peer.commands.cli import main
from peer.commands.simulate.exchanges import OverlappedSwap
from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.simulation import Simulation, workers
from peer.data.tokenizer import SEPARATOR
from peer.errors import RunError
from peer.process import Stop, stop_signals
from peer.replica.inner_loop import InnerLoop
from tests.unit.commands.simulate_harness import config, replica_of
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
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line sets up the whole process' logging, on a stream that is gone after the test, and its signals."""
    monkeypatch.setattr("peer.logs.setup", lambda *arguments: None)
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def simulate(folder: Path, *arguments: str) -> int:
    sets = [word for override in (*TINY, f"run.dir={folder}") for word in ("--set", override)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--config", str(ROOT / "configs" / "demo.yaml"), *sets, *arguments])
    return int(ended.value.code or 0)


def test_it_writes_a_summary_with_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "--replicas", "3", "--method", "diloco", "--drop", "0.2", "--speeds", "1", "0.5") == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"peers", "swarm"} and set(summary["swarm"]) == SUMMARY_SWARM
    assert len(json.loads((tmp_path / "curves.json").read_text())) > 1 and len([*tmp_path.iterdir()]) == 2
    assert summary["swarm"]["method"] == "diloco"
    assert set(summary["peers"]) == {"replica-0", "replica-1", "replica-2"}
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
        (["--replicas", "4", "--set", "run.inner_time=600", "--method", "diloco"], "run.inner_time: a simulation has"),
        (["--replicas", "4", "--set", "run.inner_time=600", "--network"], "run.inner_time: a simulation has phases"),
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


@pytest.mark.parametrize("file", ["summary.json", "curves.json"])
def test_figures_that_cannot_be_written_are_on_the_terminal(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were lost at the end of the work, in a traceback."""
    monkeypatch.setattr("peer.commands.simulate.command.set_aside", lambda *_: None)
    (tmp_path / file).symlink_to("/dev/full")
    assert simulate(tmp_path, "--replicas", "2") == 1
    said = capsys.readouterr()
    assert said.err == f"error: cannot write the figures to {tmp_path / file}: No space left on device\n"
    assert "demo: noloco, 2 replicas, H 4: validation loss" in said.out and "Figures:" not in said.out


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


class CtrlC:
    """Two replicas at work: the first one ends by ``KeyboardInterrupt``, the other one waits for the stop."""

    def __init__(self) -> None:
        self.simulation = Simulation(config(inner_steps=12), Options(replicas=2, method=Method.NOLOCO, workers=2))
        self._both = threading.Barrier(2, timeout=10)

    def comes(self, loop: InnerLoop) -> bool:
        """Was the stop requested within ten seconds?"""
        self._both.wait()
        if loop is self.simulation.replicas[0].state.inner:
            raise KeyboardInterrupt
        until = time.monotonic() + 10
        while not self.simulation.stop.requested and time.monotonic() < until:
            time.sleep(0.005)
        return self.simulation.stop.requested

    def run(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.simulation.run(lambda line: None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RunError])
def test_after_ctrl_c_or_an_error_no_thread_begins_anything(error: type[BaseException]) -> None:
    """All replicas trained to the end of their phases, which are hours of a large model."""
    stop, ending = Stop(), threading.Event()
    with pytest.raises(error), workers(1, stop) as pool:
        pool.submit(ending.wait, 10)
        waiting = pool.submit(lambda: None)
        waiting.add_done_callback(lambda future: ending.set())
        raise error("something is wrong")
    assert waiting.cancelled()
    assert stop.requested


def test_after_ctrl_c_no_replica_begins_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ctrl_c, seen = CtrlC(), []

    def step(loop: InnerLoop, batch: Any, rate: float) -> Any:
        if loop.step == 2:
            seen.append(ctrl_c.comes(loop))
        return torch.tensor(1.0), torch.tensor(1.0)

    monkeypatch.setattr(InnerLoop, "_train_step", step)
    ctrl_c.run()
    assert seen == [True]
    assert [it.state.inner.step for it in ctrl_c.simulation.replicas] == [2, 3]


def test_after_ctrl_c_a_sample_evaluates_no_further_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ctrl_c, seen = CtrlC(), []

    def evaluate(loop: InnerLoop, batches: Any) -> float:
        iterator = iter(batches)
        next(iterator)
        seen.append((ctrl_c.comes(loop), list(iterator)))
        return 1.0

    monkeypatch.setattr(InnerLoop, "evaluate", evaluate)
    ctrl_c.run()
    assert seen == [(True, [])]


def test_after_a_stop_an_overlapped_swap_trains_nothing() -> None:
    one, two = (replica_of(name, 32, 16) for name in ("one", "two"))
    one.stop = two.stop = Stop()
    one.stop.request()
    OverlappedSwap(one, two, 8).run()
    assert [it.state.inner.step for it in (one, two)] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_replicas_and_is_exit_code_0(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one, while the threads ended, aborted the process; now it ends at once, as a peer does."""
    found: list[Simulation] = []

    def interrupted(simulation: Simulation, say: Any) -> NoReturn:
        found.append(simulation)
        signal.raise_signal(number)
        raise AssertionError("the signal was ignored")

    monkeypatch.setattr(Simulation, "run", interrupted)
    assert simulate(tmp_path, "--replicas", "2") == 0
    assert found[0].stop.requested
