"""What happens in a peer's folder before it joins."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
from torch import Tensor

from peer import clock, process
from peer.commands.check import training as check
from peer.config.schema import CheckpointConfig, Config, MetricsConfig, PeerConfig, PushConfig, RunConfig
from peer.data.batches import TokenStream
from peer.data.prefetch import Prefetched
from peer.errors import UserError
from peer.process import Stop
from peer.training import assemble
from peer.training.member import Membership
from tests.unit import parts


def begin(folder: Path, *, resume: bool) -> None:
    """Assemble a peer up to its node."""
    own = PeerConfig(name="a", checkpoint=CheckpointConfig(resume=resume), metrics=MetricsConfig(port=0))
    with (
        pytest.raises(UserError, match="no node"),
        assemble.assembled(Config(run=RunConfig(dir=folder), peer=own), Mock()),
    ):
        pass


def test_a_run_that_begins_anew_keeps_the_earlier_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows were emptied and its checkpoints removed."""
    monkeypatch.setattr(assemble.logs, "setup", lambda peer, logfile: None)
    monkeypatch.setattr(assemble, "member_node", Mock(side_effect=UserError("no node")))
    monkeypatch.setattr(assemble.log, "handle", caplog.handler.handle)
    monkeypatch.setattr(assemble.log, "level", logging.INFO)
    files = (
        "checkpoints/latest",
        "rounds.jsonl",
        "evals.jsonl",
        "tensorboard/events",
    )  # which draws a folder as one run
    for name in files:
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text(name)
    begin(tmp_path, resume=True)
    assert all((tmp_path / "a" / name).read_text() == name for name in files)
    begin(tmp_path, resume=False)
    (aside,) = (tmp_path / "a").glob("before-*")
    assert all((aside / name).read_text() == name for name in files)
    assert not any((tmp_path / "a" / name).exists() for name in files)
    assert f"begins anew: the earlier run is in {aside}" in caplog.text
    begin(tmp_path, resume=False)
    assert list((tmp_path / "a").glob("before-*")) == [aside]


def test_what_a_push_has_left_at_a_power_cut_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a peer that pushes again removed it: its bytes, of an old checkpoint, stayed for ever."""
    monkeypatch.setattr(assemble.logs, "setup", lambda peer, logfile: None)
    monkeypatch.setattr(assemble, "member_node", Mock(side_effect=UserError("no node")))
    (left := tmp_path / "a" / "push" / "step_00000001" / "model.safetensors").parent.mkdir(parents=True)
    left.write_bytes(b"weights")
    begin(tmp_path, resume=True)
    assert not (tmp_path / "a" / "push").exists()


@pytest.mark.parametrize("push", [None, PushConfig(to="me/model")], ids=["no push", "push"])
def test_a_push_needs_space_beside_the_checkpoints(
    push: PushConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slow one ran, saves failed on a full disk, and a stop lost the state."""
    monkeypatch.setattr(assemble.logs, "setup", lambda peer, logfile: None)
    monkeypatch.setattr(assemble, "member_node", joined := Mock(return_value=(node := Mock(failure=""))))
    for name in ("connect", "corpus_of", "Pusher"):
        monkeypatch.setattr(assemble, name, Mock())
    monkeypatch.setattr(assemble, "read_ahead", read_ahead := Mock())
    state = Mock(checkpoint_bytes=100, push_bytes=50)
    monkeypatch.setattr(assemble.replica, "replica", Mock(return_value=state))
    monkeypatch.setattr(assemble.Checkpoints, "require_space", asked := Mock(side_effect=UserError("no space")))
    own = PeerConfig(name="a", push=push, metrics=MetricsConfig(port=0))
    config, signals = Config(run=RunConfig(dir=tmp_path), peer=own), Mock(stop=Stop())
    with pytest.raises(UserError, match="no space"), assemble.assembled(config, signals):
        pass
    asked.assert_called_once_with(100, 50 if push else 0)
    away = read_ahead.call_args.args[3]
    assert not away()
    node.failure = "the p2p daemon has ended"
    assert away()  # which ends the wait for a batch
    node.failure = ""
    pause = joined.call_args.args[0].context.pause
    pause.requested = True
    assert away()
    pause.requested = False
    with pause.rest():  # it comes back when the batch is there
        assert not away()
    signals.stop.request()
    assert away()


def test_what_a_peer_loads_before_it_has_joined_is_time_of_the_phase_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ``apply``, a phase of rounds: a peer that loaded for 20 minutes was called stuck when it had joined."""
    monkeypatch.setattr(assemble.logs, "setup", lambda peer, logfile: None)
    monkeypatch.setattr(assemble, "member_node", node := Mock())
    seen: dict[str, float | None] = {}

    def note(step: str) -> None:
        registry = node.call_args.args[0].metrics.registry
        seen[step] = registry.get_sample_value("noloco_phase_info", {"phase": "join"})

    def noting(step: str, result: object) -> Mock:
        return Mock(side_effect=lambda *_, **__: note(step) or result)

    state = Mock(checkpoint_bytes=0, push_bytes=0)
    monkeypatch.setattr(assemble, "connect", noting("network", None))
    monkeypatch.setattr(assemble.model_source, "pinned", Mock(side_effect=lambda config: note("files") or config))
    monkeypatch.setattr(assemble, "corpus_of", noting("data", Mock(others={})))
    monkeypatch.setattr(assemble.replica, "replica", noting("model", state))
    monkeypatch.setattr(assemble, "Membership", noting("member", Mock()))
    for name in ("read_ahead", "validation", "Validation", "Saver", "Trainer"):
        monkeypatch.setattr(assemble, name, Mock())
    own = PeerConfig(name="a", metrics=MetricsConfig(port=0))
    with assemble.assembled(Config(run=RunConfig(dir=tmp_path), peer=own), Mock(stop=Stop())):
        note("trainer")
    assert seen == {"network": 1, "files": 1, "data": 1, "model": 1, "member": 1, "trainer": 0}


@pytest.mark.parametrize(("wish", "expected"), [(None, 2), (4, 4)], ids=["torch's choice", "peer.threads"])
def test_torch_computes_with_the_threads_that_a_container_has_cores_for(
    wish: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took one for each core of the machine, which the quota then stopped for most of the time."""
    monkeypatch.setattr(assemble.logs, "setup", lambda peer, logfile: None)
    for name in ("member_node", "connect", "corpus_of"):
        monkeypatch.setattr(assemble, name, Mock())
    monkeypatch.setattr(assemble.replica, "replica", Mock(side_effect=UserError("no replica")))
    monkeypatch.setattr(process, "CONTAINER", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    own = PeerConfig(name="a", threads=wish, metrics=MetricsConfig(port=0))
    config, usual = Config(run=RunConfig(dir=tmp_path), peer=own), torch.get_num_threads()
    torch.set_num_threads(3)  # the choice of a machine with more cores
    try:
        (finding,) = check.device(config, 1)
        with pytest.raises(UserError, match="no replica"), assemble.assembled(config, Mock(stop=Stop())):
            pass
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(usual)
    assert f"CPU with {expected} threads" in finding.text


class Far(TokenStream):
    """The place of a resume is half an hour away."""

    def take(self, count: int) -> Iterator[Tensor]:
        if not self.position:
            clock.sleep(1800.0)
        yield from super().take(count)


class Joining:
    """A membership's join, in virtual time, of a peer whose place in the data is far; notes what it asks when."""

    def __init__(self, folder: Path, *, start_with: int = 1, position: int = 0, step: int = 0) -> None:
        self.state, self.asked, self.began = (
            parts.peer_state(),
            list[tuple[float, str, int | None]](),
            clock.monotonic(),
        )
        far = Far(parts.TEXT, batch_size=4, sequence_length=parts.LENGTH, seed=0, stream=0)
        self.state.stream = Prefetched(far, pin=False, passed=lambda: int(clock.monotonic()))
        self.state.stream.resume(position, None)
        self.state.inner.step = step
        member = MagicMock()
        member.resources.own.start_with = start_with
        member.presence.start_barrier.await_others.side_effect = self.await_others
        own = PeerConfig(name="a", checkpoint=CheckpointConfig(resume=False))
        config = Config(run=RunConfig(dir=folder, steps=100), peer=own)
        with patch("peer.training.member.catch_up", lambda *_, latest=None, **__: self.note("a state", latest)):
            Membership.join(
                member,
                lambda: assemble._resume(config, self.state, Mock()),
                lambda: assemble._await_data(config, self.state),
            )

    def note(self, what: str, latest: int | None = None) -> None:
        self.asked.append((round(clock.monotonic() - self.began), what, latest))

    def await_others(self, count: int, seconds: float) -> int:
        self.note("others")
        clock.sleep(5.0)
        return 7


@pytest.mark.usefixtures("virtual")
def test_a_peer_asks_for_the_swarms_state_when_it_has_found_its_place_in_the_data(tmp_path: Path) -> None:
    """It asked first. Its first swap was of weights as old as the search had taken, which counted as an inner step."""
    joined = Joining(tmp_path)
    assert joined.asked == [(1800, "a state", None)]
    state = joined.state
    progress = state.inner._context.progress
    progress.begin(3, 3)
    assert state.inner.run(state.stream.take(3)).steps == 3
    assert progress.step_seconds == 0  # in virtual time a step takes none


@pytest.mark.usefixtures("virtual")
def test_peers_that_begin_together_see_one_another_before_they_look_for_their_places(tmp_path: Path) -> None:
    """Each was seen when its own search was over: the first one began alone after a minute."""
    joined = Joining(tmp_path, start_with=3)
    assert joined.asked == [(0, "a state", None), (0, "others", None), (1800, "a state", None)]


@pytest.mark.usefixtures("virtual")
def test_a_peer_whose_data_came_while_it_waited_for_others_begins_with_them(tmp_path: Path) -> None:
    """A member that it asked would be a round further by chance."""
    joined = Joining(tmp_path, start_with=3, position=1)
    assert joined.asked == [(0, "a state", None), (0, "others", None), (5, "a state", 7)]


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("start_with", [1, 3])
def test_a_peer_whose_run_is_done_waits_for_no_data(start_with: int, tmp_path: Path) -> None:
    """It looked for a place in which nobody would read."""
    joined = Joining(tmp_path, start_with=start_with, step=100)
    assert joined.asked[-1] == ((0, "a state", None) if start_with == 1 else (5, "a state", 7))
