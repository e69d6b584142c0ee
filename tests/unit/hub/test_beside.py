"""Checkpoints reach the hub beside training: by a process of lowest priority, one at a time; a failure is one line."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load

from peer.config.load import dump
from peer.config.load import load as load_config
from peer.config.schema import PushConfig
from peer.errors import UserError
from peer.hub import beside
from peer.hub.beside import Pusher
from peer.process import Stop
from peer.training.checkpoint import hold_model
from tests.unit.commands.test_export import config, saved, trained
from tests.unit.hub.server import READ, WRITE, Hub

PATIENCE = 300.0  # seconds that only a hang takes
TO = PushConfig(to="me/model", every_rounds=10, max_upload="50mbit")


def environment_of(pid: int) -> bytes:
    """Empty for a moment while the program is loaded."""
    deadline = time.monotonic() + PATIENCE
    while not (text := Path(f"/proc/{pid}/environ").read_bytes()):
        assert time.monotonic() < deadline, "the process has no environment"
        time.sleep(0.001)
    return text


def wait_for_the_end(pusher: Pusher) -> None:
    deadline = time.monotonic() + PATIENCE
    while pusher._process is not None:
        assert time.monotonic() < deadline
        pusher.look()
        time.sleep(0.05)


def test_a_due_checkpoint_is_pushed_by_a_process_that_gives_way(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "noloco")
    state = trained(config(tmp_path), 1)
    home = saved(tmp_path, "alice", state)
    checkpoint = home / "checkpoints" / "step_00000006"
    pusher = Pusher(TO, home, Stop(), hold_model)
    pusher.saved(checkpoint, 3)
    assert pusher._process is None  # not due
    pusher.saved(checkpoint, 12)
    first = pusher._process
    assert first is not None
    assert {"optimizer.safetensors", "outer.safetensors"} < {path.name for path in checkpoint.iterdir()}
    held = {path.name for path in (home / "push" / checkpoint.name).iterdir()}
    assert held == {"state.json", "model.safetensors"}  # the others' bytes would stay on the disk while it runs
    shutil.rmtree(checkpoint)  # as newer checkpoints do
    assert os.getpriority(os.PRIO_PROCESS, first.pid) == 19
    assert Path(f"/proc/{first.pid}/oom_score_adj").read_text().strip() == "1000"
    assert b"CUDA_VISIBLE_DEVICES=\0" in environment_of(first.pid)
    assert b"--max-upload\x0050mbit\0" in Path(f"/proc/{first.pid}/cmdline").read_bytes()
    pusher.saved(checkpoint, 40)
    assert pusher._process is first  # never two at once
    wait_for_the_end(pusher)
    assert [line.partition(" seconds=")[0] for line in caplog.messages] == ["pushed: step=6 to=me/model"]
    made = hub.repositories["me/model"]
    assert made.private and made.commits == ["demo, step 6"]
    weights = load(made.files["model.safetensors"])
    theta = state.inner.model.state_dict()
    assert all(torch.equal(value, theta[name]) for name, value in weights.items())
    assert b"noloco" in made.files["README.md"] and WRITE.encode() not in b"".join(made.files.values())
    assert not (home / "push").exists()


def test_a_failure_is_one_line_and_the_next_is_tried(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", READ)
    pusher = Pusher(TO, home := saved(tmp_path, "alice", trained(config(tmp_path), 1)), Stop(), hold_model)
    checkpoint = home / "checkpoints" / "step_00000006"
    pusher.say_rights()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("pushes will fail, training goes on: me/model: the token may only read")
    pusher.saved(checkpoint, 10)
    wait_for_the_end(pusher)
    assert len(caplog.messages) == 2 and READ not in caplog.text
    assert caplog.messages[1].startswith("step 6 is not pushed, training goes on: me/model: the token may only read")
    pusher.saved(checkpoint, 15)
    assert pusher._process is None
    pusher.saved(checkpoint, 20)
    assert pusher._process is not None
    pusher.close()


def test_a_peer_that_goes_back_some_rounds_pushes_no_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a split a member takes the lower round of its group: no push was due for as many rounds more."""
    pusher, pushed = Pusher(TO, tmp_path, Stop(), hold_model), list[str]()
    monkeypatch.setattr(pusher, "_start", lambda checkpoint: pushed.append(checkpoint.name))
    for round in (99, 100, 60, 69, 70, 79, 80):
        pusher.saved(tmp_path / f"in_{round}", round)
    assert pushed == ["in_100", "in_70", "in_80"]


def test_a_hub_that_is_away_at_the_start_may_come_back(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    Pusher(TO, tmp_path, Stop(), hold_model).say_rights()
    assert len(caplog.messages) == 1
    said = "pushes may fail, training goes on: me/model: the network or the Hugging Face hub does not answer: "
    assert caplog.messages[0].startswith(said)


@pytest.mark.long
def test_the_last_weights_of_a_run_are_waited_for(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "noloco")
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    pusher = Pusher(TO, home, Stop(), hold_model)
    pusher.finish_with(home / "checkpoints" / "step_00000006")
    pusher.close()
    assert hub.repositories["me/model"].commits == ["demo, step 6"]
    pusher.close()  # it is there
    assert len(hub.repositories["me/model"].commits) == 1


@pytest.mark.parametrize(
    ("done", "stops", "seconds", "says"),
    [
        (False, False, 9.0, "the peer has ended before"),
        (True, True, 9.0, "the peer has ended before"),
        (True, False, 0.0, "not done after 0 hours"),
    ],
    ids=["an error ends the peer", "Ctrl+C", "too long"],
)
def test_a_push_ends_with_the_peer_or_its_deadline(
    hub: Hub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    done: bool,
    stops: bool,
    seconds: float,
    says: str,
) -> None:
    hub.silent.set()
    monkeypatch.setattr(beside, "PUSH_SECONDS", seconds * 3600)
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    stop, checkpoint = Stop(), home / "checkpoints" / "step_00000006"
    pusher = Pusher(TO, home, stop, hold_model)
    pusher.saved(checkpoint, 9)
    pusher.saved(checkpoint, 10)
    process = pusher._process
    assert process is not None
    if done:
        pusher.finish_with(checkpoint)
    if stops:
        stop.request()
    pusher.close()
    assert process.exit_code() == -9 and {*caplog.messages} == {f"step 6 is not pushed: {says}"}
    assert not (home / "push").exists()


def test_a_peer_that_stops_begins_no_push(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ended the push at once, and said that training goes on."""
    stop, home = Stop(), saved(tmp_path, "alice", trained(config(tmp_path), 1))
    pusher = Pusher(TO, home, stop, hold_model)
    stop.request()
    for round in (9, 10):
        pusher.saved(home / "checkpoints" / "step_00000006", round)
        assert pusher._process is None
    pusher.close()
    assert caplog.messages == []


def test_a_push_ends_when_its_peer_is_killed(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then nobody closes it: the other end of its standard input is gone."""
    hub.silent.set()
    home = saved(tmp_path, "alice", trained(config(tmp_path), 1))
    pusher, checkpoint = Pusher(TO, home, Stop(), hold_model), home / "checkpoints" / "step_00000006"
    pusher.saved(checkpoint, 9)
    pusher.saved(checkpoint, 10)
    process = pusher._process
    assert process is not None and process._process.stdin is not None
    deadline = time.monotonic() + PATIENCE
    while not hub.requests:  # it waits for the hub
        assert process.exit_code() is None and time.monotonic() < deadline, process.last_line()
        time.sleep(0.05)
    process._process.stdin.close()
    assert process._process.wait(PATIENCE) == -15
    pusher.look()
    assert caplog.messages[0].endswith("training goes on: ended by signal 15")


@pytest.mark.parametrize("works", [False, True])
def test_on_a_file_system_without_links_the_checkpoint_itself_is_read(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = iter([works])  # the first one may, as on a disk that gets full

    def link(source: Path, target: Path) -> None:
        if not next(links, False):
            raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    checkpoint = saved(tmp_path, "alice", trained(config(tmp_path), 1)) / "checkpoints" / "step_00000006"
    assert hold_model(checkpoint, tmp_path / "push") == checkpoint


def test_a_disk_that_is_full_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pusher = Pusher(TO, tmp_path / "no-folder", Stop(), hold_model)
    pusher.saved(tmp_path / "step_00000001", 10)
    assert caplog.messages == ["step 1 is not pushed, training goes on: No such file or directory"]


@pytest.mark.parametrize("name", ["model", "a/b/c", "/x", "https://hub/me/model", "me/mo del", "me/"])
def test_a_name_that_is_none_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(UserError, match=r"peer\.push\.to"):
        load_config(None, [f"peer.push.to={name}"], environment={})


def test_the_token_is_in_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITE)
    shown = dump(load_config(None, ["peer.push.to=me/model"]))
    assert "to: me/model" in shown and "private: true" in shown and WRITE not in shown
    assert "push" not in load_config(None, []).run.model_dump()
