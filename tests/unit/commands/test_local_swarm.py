"""The launcher's view of its peers, from rows written by hand. More of it is in test_run_folder.py."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from peer.commands.local_swarm import summary, swarm
from peer.commands.local_swarm.summary import in_words, summarize
from peer.commands.local_swarm.table import SwarmView
from peer.commands.local_swarm.tail import Tail
from peer.config.model import AutoModel
from peer.config.schema import Config, EvaluationConfig, LlamaModel, NetworkConfig, PeerConfig, RunConfig, StdlibData
from peer.data.open import corpus_of, validation
from peer.errors import RunError, UserError
from peer.process import LoopContext, Stop, stop_signals
from peer.replica import inner_loop, model
from peer.replica.inner_loop import mean_loss
from peer.training import replica
from peer.training.checkpoint import Checkpoints
from peer.training.state import BEGIN_ANEW_ADVICE
from tests.saved import save_checkpoint
from tests.unit.commands.export.test_models import roformer
from tests.unit.data.harness import text_with_a_set
from tests.unit.device.doubles import plug_in
from tests.whole_tail import WholeTail

CONFIG = Config(
    run=RunConfig(
        model=LlamaModel(hidden_size=8, intermediate_size=16, layers=1, heads=1),
        data=StdlibData(sequence_length=16),
        evaluation=EvaluationConfig(batches=2),
    )
)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """And SIGHUP as in a terminal: under nohup the command would not get it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def row(number: int, outcome: str = "merged", partner: str | None = "b") -> dict[str, Any]:
    return {
        "round": number,
        "step": 10 * number,
        "tokens": 640 * number,
        "first_train_loss": 5.0 - number,
        "train_loss": 4.5 - number,
        "partner": partner,
        "outcome": outcome,
        "seconds": {"inner": 7.0, "match": 1.0, "exchange": 1.0, "apply": 1.0},
        "bytes_sent": 2**20,
        "bytes_received": 2**19,
    }


def write(folder: Path, rounds: list[dict[str, Any]], losses: tuple[float, ...] = (5.0, 2.0)) -> WholeTail:
    folder.mkdir(parents=True, exist_ok=True)
    evals = [{"step": 0, "tokens": 0, "val_loss": loss} for loss in losses]
    for name, lines in (("rounds.jsonl", rounds), ("evals.jsonl", evals)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    tail = WholeTail(folder.name, folder)
    tail.poll()
    return tail


def test_a_file_that_comes_byte_by_byte_is_read_once_and_whole(tmp_path: Path) -> None:
    data = "".join(json.dumps(row(number)) + "\n" for number in (1, 2, 3)).encode()
    tail, seen = WholeTail("a", tmp_path), []
    assert tail.poll() == []  # not there yet
    for start in range(0, len(data), 7):
        with (tmp_path / "rounds.jsonl").open("ab") as file:
            file.write(data[start : start + 7])
        seen += tail.poll()
    assert seen == tail.rounds == [row(1), row(2), row(3)]


@pytest.mark.parametrize("half", ["", '{"round": 4, "st'])
def test_a_file_that_was_taken_back_is_read_again(tmp_path: Path, half: str) -> None:
    tail = write(tmp_path / "a", [row(1), row(2), row(3)], losses=(5.0, 4.0, 3.0))
    path = tail.folder / "rounds.jsonl"
    with path.open("a") as file:
        file.write(half)
    assert tail.poll() == []
    write(tail.folder, [row(1)], losses=(5.0,))
    assert tail.poll() == [row(1)]
    with path.open("a") as file:
        file.write(json.dumps(row(2, "alone", None)) + "\n")
    assert [item["outcome"] for item in tail.poll()] == ["alone"]
    assert [item["round"] for item in tail.rounds] == [1, 2]
    assert [item["val_loss"] for item in tail.evals] == [5.0]
    again = Tail("a", tail.folder)
    again.poll()
    assert tail.summary() == again.summary() and tail.summary()["steps"] == 20


def test_the_rows_of_a_long_run_are_not_kept(tmp_path: Path) -> None:
    """The command kept each row of each peer until its end."""
    rows = [row(number, ("merged", "alone")[number % 3 == 0], "bc"[number % 2]) for number in range(1, 2001)]
    rows[0] |= {"first_train_loss": None, "train_loss": None}
    tail, path = Tail("a", tmp_path), tmp_path / "rounds.jsonl"
    for part in (rows[:1000], rows[1000:]):
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in part))
        assert len(tail.poll()) == 1000
    held = [it for it in vars(tail).values() if isinstance(it, dict) and "round" in it]
    assert len(held) == 3 and not any(
        isinstance(it, list) for it in (*vars(tail).values(), *vars(tail._rounds).values())
    )
    assert tail.summary() == {
        "steps": 20_000,
        "tokens": 1_280_000,
        "first_train_loss": 3.0,
        "last_train_loss": -1995.5,
        "first_val_loss": None,
        "val_loss": None,
        "rounds": {"merged": 1334, "alone": 666, "timeout": 0, "refused": 0, "corrupt": 0, "poisoned": 0},
        "idle_share": pytest.approx(0.2),
        "partners": {"b": 667, "c": 667},
        "bytes_sent": 2000 * 2**20,
        "bytes_received": 2000 * 2**19,
    }


def test_the_figures_of_a_swarm_are_those_of_its_rows(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [row(1), row(2, "alone", None), row(3, partner="c")])
    two = write(tmp_path / "b", [row(1, partner="a"), row(2, "timeout", "c")], losses=(5.0, 3.0))
    summary = json.loads(json.dumps(summarize(CONFIG, [one, two], 12.0)))
    swarm, peers = summary["swarm"], summary["peers"]
    assert (swarm["method"], swarm["peers"], swarm["tokens"], swarm["wall_seconds"]) == ("noloco", 2, 3200, 12.0)
    assert (swarm["val_loss_mean"], swarm["val_loss_worst"]) == (2.5, 3.0)
    assert swarm["idle_share"] == pytest.approx(0.2)
    assert swarm["bytes_sent"] == 5 * 2**20
    assert peers["a"]["partners"] == {"b": 1, "c": 1}
    assert peers["b"]["rounds"]["timeout"] == 1
    assert (peers["a"]["first_train_loss"], peers["a"]["last_train_loss"]) == (4.0, 1.5)
    assert (swarm["val_loss_averaged_model"], swarm["spread"]) == (None, None)  # nobody saved
    words = in_words(summary)
    for said in ("2 peers trained on 3,200 tokens in 12 s by noloco", "5.000 at the start, 2.500 at the end",
                 "worst peer 3.000", "3 of 5 rounds merged", "1 to 2 different ones", "20.0%", "2.5 MiB"):  # fmt: skip
        assert said in words


def test_a_round_without_an_inner_step_has_no_loss(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """As a peer has it that took over a member's state at a boundary."""
    rows = [dict(row(number), idle_share=0.25, tokens_per_second=0.0, detail="") for number in (1, 2, 3)]
    for index in (0, 2):
        rows[index] |= {"first_train_loss": None, "train_loss": None}
    tail = write(tmp_path / "a", rows)
    assert (tail.summary()["first_train_loss"], tail.summary()["last_train_loss"]) == (3.0, 2.5)
    for terminal in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        with SwarmView("a swarm", 30) as view:
            view.show([tail], [(tail, rows[-1])])
        assert "merged" in capsys.readouterr().out


def test_the_averaged_model_and_the_spread_are_of_the_newest_checkpoints(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update=text_with_a_set(tmp_path))})
    base = model.build(config.run)
    weights = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    tails = []
    for name, shift in (("a", -0.5), ("b", 0.0), ("c", 0.5)):
        tails.append(write(tmp_path / name, [row(1)]))
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", keep=2)
        assert save_checkpoint(
            checkpoints, 10, {}, {"model": {key: value + 9 for key, value in weights.items()}}.items()
        )
        assert save_checkpoint(
            checkpoints, 20, {}, {"model": {key: value + shift for key, value in weights.items()}}.items()
        )
    with patch.object(inner_loop, "batch_loss", wraps=inner_loop.batch_loss) as losses:
        swarm = summarize(config, tails, 1.0)["swarm"]
    assert {len(it.args[1]) for it in losses.call_args_list} == {1}  # the logits of a whole batch may be 250 GiB
    batches = validation(config.run, corpus_of(config.run).validation)
    assert swarm["val_loss_averaged_model"] == pytest.approx(mean_loss(base, batches, torch.device("cpu")), rel=1e-4)
    assert swarm["spread"] == pytest.approx((0.5 / 3) ** 0.5, rel=1e-4)
    meta = torch.device("meta")
    with (
        patch.object(summary, "pick_device", return_value=meta) as picked,
        patch.object(summary, "mean_loss_by_rows", return_value=1.0) as loss,
    ):
        config = config.model_copy(update={"peer": PeerConfig(precision="bf16")})
        summarize(config, tails, 1.0)  # on the accelerator: a CPU needs hours for a model of 1.1B
    picked.assert_called_once_with(config.peer.device)
    network, _, device = loss.call_args.args
    assert device == meta == next(network.parameters()).device
    assert loss.call_args.kwargs == {"autocast": True}


def test_the_average_of_one_peer_has_its_loss_in_its_precision(tmp_path: Path) -> None:
    run = CONFIG.run.model_copy(update=text_with_a_set(tmp_path))
    config = CONFIG.model_copy(update={"run": run, "peer": PeerConfig(precision="bf16")})
    corpus, cpu = corpus_of(run), torch.device("cpu")
    batches = validation(run, corpus.validation)
    inner = replica.replica(config, corpus.train, stream=0, device=cpu, context=LoopContext()).inner
    with torch.no_grad():
        for it in inner.model.parameters():
            it.mul_(8)  # so that bf16 rounds visibly
    tail = write(tmp_path / "a", [row(1)])
    weights = {name: it.detach() for name, it in inner.model.named_parameters()}
    assert save_checkpoint(Checkpoints(tail.folder / "checkpoints", keep=2), 10, {}, {"model": weights}.items())
    found, own = summarize(config, [tail], 1.0)["swarm"]["val_loss_averaged_model"], inner.evaluate(batches)
    assert abs(found - own) < 0.1 * abs(found - mean_loss(inner.model, batches, cpu)), (found, own)


@pytest.mark.parametrize(
    ("place", "error", "why"),
    [
        ("corpus_of", UserError("run.data.train: no file matches books/*.txt"), "run.data.train: no file matches"),
        ("corpus_of", RunError("the hub does not answer"), "the hub does not answer"),
        ("mean_loss_by_rows", torch.OutOfMemoryError("CUDA out of memory."), "the accelerator has no memory left"),
    ],
)
def test_an_averaged_model_that_cannot_be_evaluated_costs_one_figure(
    place: str, error: Exception, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """It cost all: there was no summary.json, and the command failed."""
    write(tmp_path / "peer-0", [row(1)])
    weights = {name: it.detach() for name, it in model.build(CONFIG.run).named_parameters()}
    save_checkpoint(Checkpoints(tmp_path / "peer-0" / "checkpoints", keep=2), 10, {}, {"model": weights}.items())
    monkeypatch.setattr(summary, place, Mock(side_effect=error))
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)  # logs.setup of another test turns it off
    assert launched(tmp_path, monkeypatch, resume=True) == 0
    assert f"the average of the peers' weights is not evaluated: {why}" in caplog.text
    found = json.loads((tmp_path / "summary.json").read_text())["swarm"]
    assert (found["val_loss_averaged_model"], found["spread"], found["val_loss_mean"]) == (None, 0.0, 2.0)


def test_what_is_not_trained_is_that_of_the_first_peer(tmp_path: Path) -> None:
    """A frozen parameter was a traceback at the end of a swarm."""
    settings = AutoModel(**roformer(tmp_path / "source"))
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"model": settings})})
    network = model.build(config.run)
    everything = dict(network.state_dict())
    weights = {name: value.detach() for name, value in network.named_parameters() if value.requires_grad}
    untrained = {name: 3 * it for name, it in network.named_parameters() if not it.requires_grad}
    tails = [write(tmp_path / name, [row(1)]) for name in ("a", "b")]
    for tail, parts in zip(tails, ({"model": weights, "untrained": untrained}, {"model": weights}), strict=True):
        assert save_checkpoint(Checkpoints(tail.folder / "checkpoints", keep=2), 10, {}, parts.items())
    found = summarize(config, tails, 1.0)["swarm"]["val_loss_averaged_model"]
    network.load_state_dict({**everything, **untrained})
    batches = validation(config.run, corpus_of(config.run).validation)
    assert found == pytest.approx(mean_loss(network, batches, torch.device("cpu")), rel=1e-5)


@pytest.mark.parametrize("losses", [(), (5.0,)])
def test_peers_that_never_finished_a_round_have_words_too(tmp_path: Path, losses: tuple[float, ...]) -> None:
    tails = [write(tmp_path / name, [], losses) for name in ("a", "b")]
    summary = summarize(CONFIG, tails, 3.0)
    assert summary["peers"]["a"]["idle_share"] is None
    assert in_words(summary).startswith("2 peers trained on 0 tokens")
    assert ("5.000 at the start" in in_words(summary)) == bool(losses)


def swarm_of_one(folder: Path, *, resume: bool = False) -> swarm.LocalSwarm:
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"dir": folder})})
    return swarm.LocalSwarm(config, [], [], peers=1, resume=resume)


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool) -> int:
    """The exit code of a swarm of one peer that has ended at once."""
    monkeypatch.setattr(swarm.signal, "signal", Mock())
    monkeypatch.setattr(swarm.LocalSwarm, "_start", lambda self: [Mock()])
    monkeypatch.setattr(swarm.LocalSwarm, "_watch", lambda self, peers, tails: [])
    return swarm_of_one(folder, resume=resume).run()


def test_a_resumed_swarm_counts_the_time_of_the_rounds_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens were set against the seconds of the last part."""
    write(tmp_path / "peer-0", [row(1), row(2), row(3)])
    assert launched(tmp_path, monkeypatch, resume=True) == 0
    resumed = json.loads((tmp_path / "summary.json").read_text())["swarm"]
    assert resumed["tokens"] == 1920
    assert resumed["wall_seconds"] == pytest.approx(30, abs=5)
    assert launched(tmp_path, monkeypatch, resume=False) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["swarm"]["wall_seconds"] < 5


def test_a_run_of_fewer_peers_moves_all_peers_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others stayed: ``export runs/peer-*`` and a resume with more peers mixed two runs."""
    others = ("peer-mine", "peer-")  # of a user
    for name in ("peer-0", "peer-1", "peer-12", *others):
        write(tmp_path / name, [row(1)])
    assert launched(tmp_path, monkeypatch, resume=False) == 0
    (aside,) = tmp_path.glob("before-*")
    assert {path.name for path in aside.iterdir()} == {"peer-0", "peer-1", "peer-12"}
    assert {path.name for path in tmp_path.glob("peer-*")} == set(others)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_no_swarm_can_use_is_a_line(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^run\.dir: cannot write to .*file/runs: Not a directory$"):
        launched(tmp_path / "file" / "runs", monkeypatch, resume=resume)
    with pytest.raises(UserError, match=r"^run\.dir: cannot write to .*file: File exists$"):
        swarm_of_one(tmp_path)._spawn("file", "peer", [])


def test_figures_that_cannot_be_written_are_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were lost, in a traceback."""
    write(tmp_path / "peer-0", [row(1)])
    (tmp_path / "summary.json").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"^cannot write the figures to .*/summary\.json: No space left on device$"):
        launched(tmp_path, monkeypatch, resume=True)
    assert "1 peers trained on 640 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_while_the_bootstrap_node_starts_starts_no_peer(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All peers were started, interrupted within their imports and called failed."""

    def interrupted(*arguments: Any) -> str:
        signal.raise_signal(number)
        return "127.0.0.1:1"

    monkeypatch.setattr(swarm, "monitor_of", interrupted)
    monkeypatch.setattr(swarm, "Child", started := Mock())
    assert swarm_of_one(tmp_path).run() == 0
    assert [call.args[0] for call in started.call_args_list] == ["bootstrap"]
    assert not (tmp_path / "summary.json").exists()


def test_a_bootstrap_node_without_a_file_of_its_addresses_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node goes on when it cannot write it."""
    monkeypatch.setattr(swarm, "monitor_of", Mock(return_value="127.0.0.1:1"))
    monkeypatch.setattr(swarm, "Child", Mock(return_value=Mock(arguments=[])))
    with pytest.raises(RunError, match=r"^cannot read .*/bootstrap/addresses: No such file or directory; see "):
        swarm_of_one(tmp_path).run()


@pytest.mark.parametrize(("port", "given"), [(31338, "auto"), ("off", "off")])
def test_no_member_has_what_only_one_peer_of_a_machine_can_have(
    port: int | str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them listened on the one port of the file, and the kernel spread the calls over them.

    With the one identity of the file or of ``NOLOCO_IDENTITY``, or an address at which nobody listens, all of them
    trained alone. With ``peer.checkpoint.resume: false`` a member that was started again began anew, and ``--resume``
    resumed nobody.
    """

    def start(name: str, module: str, arguments: list[str], *others: Any) -> Any:
        (tmp_path / "bootstrap" / "addresses").write_text("/ip4/127.0.0.1/tcp/1/p2p/Qm")
        sets = [word.partition("=") for word in arguments if "=" in word]
        values[name] = {key: value for key, _, value in sets}
        return Mock(arguments=[])

    values: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(swarm, "monitor_of", Mock(return_value="127.0.0.1:1"))
    monkeypatch.setattr(swarm, "Child", start)
    peer = PeerConfig(network=NetworkConfig(port=31337, bulk_port=port))
    update = {"run": CONFIG.run.model_copy(update={"dir": tmp_path}), "peer": peer}
    overrides = ["peer.identity=one.key", "peer.stream=1", "peer.network.port=31337", f"peer.network.bulk_port={port}"]
    overrides.append("peer.checkpoint.resume=false")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8, 9})  # of a job, on a machine with more
    swarm.LocalSwarm(CONFIG.model_copy(update=update), [], overrides, peers=2, resume=False)._start()
    for name in ("peer-0", "peer-1"):
        assert values[name]["peer.threads"] == "2"
        assert {values[name][key] for key in ("peer.network.port", "peer.metrics.port")} == {"0"}
        assert {values[name][key] for key in ("peer.identity", "peer.stream")} == {"null"}
        assert values[name]["peer.network.bulk_port"] == given
        assert values[name]["peer.checkpoint.resume"] == "true"
        assert (values[name]["peer.network.announce"], values[name]["peer.metrics.announce"]) == ("[]", "null")


def test_a_resume_of_nobody_is_refused(tmp_path: Path) -> None:
    """It began a run anew, and said nothing: of a folder with another name, for example."""
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"dir": tmp_path / "misspelt"})})
    with pytest.raises(UserError, match=r"no peer is in .*misspelt; check run\.dir"):
        swarm.LocalSwarm(config, [], [], peers=2, resume=True).run()


def test_ctrl_c_between_two_peers_starts_no_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, *arguments: Any) -> Any:
        if name == "peer-0":
            signal.raise_signal(signal.SIGINT)
        (tmp_path / "bootstrap" / "addresses").write_text("/ip4/127.0.0.1/tcp/1/p2p/Qm")
        return Mock(arguments=[], **{"exit_code.return_value": -signal.SIGINT})

    monkeypatch.setattr(swarm, "monitor_of", Mock(return_value="127.0.0.1:1"))
    monkeypatch.setattr(swarm, "Child", started := Mock(side_effect=start))
    two = swarm_of_one(tmp_path)
    two._names.append("peer-1")
    assert two.run() == 0
    assert [call.args[0] for call in started.call_args_list] == ["bootstrap", "peer-0"]


@pytest.mark.parametrize(
    ("device", "count", "given", "found"),
    [
        ("auto", 4, None, ["0", "1", "2"]),
        ("cuda", 2, "5,3", ["5", "3", "5"]),
        ("auto", 1, None, [None, None, None]),
        ("cpu", 4, "5,3", ["5,3", "5,3", "5,3"]),
    ],
)
def test_each_peer_has_a_gpu_of_its_own_as_far_as_there_are_several(
    device: str,
    count: int,
    given: str | None,
    found: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All trained on the first one. A restarted peer keeps its own."""

    def listening(*arguments: Any) -> str:
        (tmp_path / "bootstrap" / "addresses").write_text("/ip4/127.0.0.1/tcp/1/p2p/Qm")
        return "127.0.0.1:1"

    plug_in(monkeypatch, "cuda", count=count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(swarm, "monitor_of", listening)
    monkeypatch.setattr("peer.process.subprocess.Popen", started := Mock(return_value=Mock(returncode=1)))
    update = {"run": CONFIG.run.model_copy(update={"dir": tmp_path}), "peer": PeerConfig(device=device)}
    members = swarm.LocalSwarm(CONFIG.model_copy(update=update), [], [], peers=3, resume=False)._start()
    members[1].restart()
    visible = [call.kwargs["env"].get("CUDA_VISIBLE_DEVICES") for call in started.call_args_list]
    assert visible == [given, *found, found[1]]
    warning = "warning: 3 peers share 2 GPUs; --peers 2 gives each its own\n"
    assert capsys.readouterr().out == (warning if device == "cuda" else "")


def test_a_stop_ends_the_wait_for_the_bootstrap_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "START_SECONDS", 0.0)
    bootstrap, stop = Mock(**{"output.return_value": "", "exit_code.return_value": None}), Stop()
    with pytest.raises(RunError, match="did not start"):
        swarm.monitor_of(bootstrap, stop)
    stop.request()
    assert swarm.monitor_of(bootstrap, stop) == ""


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, look: Callable[[swarm.LocalSwarm], None]) -> int:
    """The exit code of a swarm of one peer that ends by ``code``. The swarm looks after it once before."""
    one = swarm_of_one(folder)
    codes = iter([None])

    def exit_code() -> int | None:
        for running in codes:
            look(one)
            return running
        return code

    peer = Mock(crashed=False, exit_code=exit_code, **{"last_line.return_value": "error: no memory"})
    monkeypatch.setattr(swarm.LocalSwarm, "_start", lambda self: [peer])
    return one.run()


def test_a_folder_of_another_run_is_refused_with_advice_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named keys that this command sets itself."""
    said = f"error: step_00000006 is of another run: run.seed is 1 here and 2 there; {BEGIN_ANEW_ADVICE}; to go on, ..."
    peer = Mock(crashed=False, **{"exit_code.return_value": 2, "last_line.return_value": said})
    monkeypatch.setattr(swarm.LocalSwarm, "_start", lambda self: [peer])
    with pytest.raises(UserError, match=r"there; choose another run\.dir, or leave out --resume .*; to go on, \.\.\.$"):
        swarm_of_one(tmp_path).run()


@pytest.mark.parametrize(("asked", "code", "found"), [(True, -2, 0), (False, -2, 1), (True, 1, 1), (True, 0, 0)])
def test_a_peer_that_was_asked_to_stop_while_it_started_has_not_failed(
    asked: bool, code: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(one: swarm.LocalSwarm) -> None:
        if asked:
            signal.raise_signal(signal.SIGINT)

    assert ended(tmp_path, monkeypatch, code, look) == found


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_a_terminal_that_is_closed_loses_no_figures(
    signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the command in a traceback. The signal may come after the first text that fails, and it comes twice."""
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w", buffering=1) as screen:
        monkeypatch.setattr("sys.stdout", screen)
        monkeypatch.setenv("TERM", "xterm")

        def look(one: swarm.LocalSwarm) -> None:
            os.close(master)
            one._children = [child]
            for _ in range(signals):
                signal.raise_signal(signal.SIGHUP)
            assert not child.ask_to_stop.called  # at once, and without saving

        child = Mock(crashed=False)
        assert ended(tmp_path, monkeypatch, 0, look) == 0
    assert (tmp_path / "summary.json").exists()


def test_output_on_a_full_disk_ends_no_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a round ended the command, and all members with it."""
    looks: list[int] = []

    def look(one: swarm.LocalSwarm) -> None:
        looks.append(1)
        shown = row(1) | {"idle_share": 0.1, "tokens_per_second": 1.0, "detail": ""}
        write(tmp_path / "peer-0", [shown])

    code = None
    with contextlib.suppress(OSError), Path("/dev/full").open("w", encoding="utf-8") as full:  # which cannot be closed
        monkeypatch.setattr("sys.stdout", full)
        code = ended(tmp_path, monkeypatch, 0, look)
    assert code == 0 and looks
    assert json.loads((tmp_path / "summary.json").read_text())["swarm"]["tokens"] == 640


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_ends_the_computation_of_the_figures_and_a_lost_terminal_does_not(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no effect."""

    def interrupted(*arguments: Any) -> dict[str, Any]:
        signal.raise_signal(number)
        return summarize(*arguments)

    monkeypatch.setattr(swarm, "summarize", interrupted)
    for it in stop_signals():
        signal.signal(it, signal.default_int_handler)
    code = None
    with contextlib.suppress(KeyboardInterrupt):
        code = ended(tmp_path, monkeypatch, 0, lambda one: None)
    assert (code == 0) == (tmp_path / "summary.json").exists() == (number == signal.SIGHUP)


@pytest.mark.parametrize("place", [(SwarmView, "show"), (swarm, "in_words")])
def test_a_reader_that_has_gone_is_no_terminal_and_loses_no_figures_that_are_there(
    place: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, Mock(side_effect=BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        ended(tmp_path, monkeypatch, 0, lambda one: None)
    assert (tmp_path / "summary.json").exists() == (place[1] == "in_words")
