"""What happens in a peer's folder before it joins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from torch import Tensor

from peer import clock
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


class Far(TokenStream):
    """The place of a resume is half an hour away."""

    def take(self, count: int) -> Iterator[Tensor]:
        if not self.position:
            clock.sleep(1800.0)
        yield from super().take(count)


@pytest.mark.usefixtures("virtual")
def test_a_peer_asks_for_the_swarms_state_when_it_has_found_its_place_in_the_data(tmp_path: Path) -> None:
    """It asked first. Its first swap was of weights as old as the search had taken, which counted as an inner step."""
    state = parts.peer_state()
    far = Far(parts.TEXT, batch_size=4, sequence_length=parts.LENGTH, seed=0, stream=0)
    state.stream = Prefetched(far, pin=False, passed=lambda: int(clock.monotonic()))
    began, asked, member = clock.monotonic(), list[float](), MagicMock()
    member.resources.own.start_with = 1
    member._catch_up.side_effect = lambda **_: asked.append(clock.monotonic() - began)
    config = Config(run=RunConfig(dir=tmp_path), peer=PeerConfig(name="a", checkpoint=CheckpointConfig(resume=False)))
    Membership.join(member, lambda: assemble._resume(config, state, Mock()))
    assert asked == [pytest.approx(1800)]
    progress = state.inner._context.progress
    progress.begin(3, 3)
    assert state.inner.run(state.stream.take(3)).steps == 3
    assert progress.step_seconds == 0  # in virtual time a step takes none
