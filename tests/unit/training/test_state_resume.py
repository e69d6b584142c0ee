"""A peer that is saved and resumed is, to the bit, the peer that was not interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.config.digest import digest
from peer.config.schema import InnerConfig, RunConfig
from peer.data.prefetch import Prefetched
from peer.errors import UserError
from peer.outer.method import Local
from peer.training.checkpoint import MODEL_PARTS, Checkpoints
from peer.training.state import PeerState
from tests.saved import resume, save_checkpoint
from tests.unit import parts
from tests.unit.data import harness
from tests.unit.parts import alone, theta

H = 6
INNER = [InnerConfig(optimizer=optimizer, learning_rate=1e-2, warmup_steps=4) for optimizer in ("adamw", "muon")]


def run(state: PeerState, steps: int) -> list[float]:
    """One step at a time, so that every loss is seen; an outer step at every boundary."""
    losses = []
    for _ in range(steps):
        losses.append(state.inner.run(state.stream.take(1)).loss)
        if state.inner.step % H == 0:
            alone(state)
    return losses


def vectors(state: PeerState) -> torch.Tensor:
    return torch.cat([theta(state), state.outer.slow.phi, state.outer.momentum])  # type: ignore[list-item]


@pytest.mark.parametrize("inner", INNER, ids=["adamw", "muon"])
@pytest.mark.parametrize("interrupted_at", [2 * H, 2 * H + 3])  # at a boundary, and in mid-phase
def test_a_resumed_peer_is_bit_equal(tmp_path: Path, interrupted_at: int, inner: InnerConfig) -> None:
    whole, first, second = (parts.peer_state(inner) for _ in range(3))
    expected = run(whole, 5 * H)
    losses = run(first, interrupted_at)
    first.counters.tokens = 99
    resume(Checkpoints(tmp_path, 1), first, second)
    assert second.counters.tokens == 99
    losses += run(second, 5 * H - interrupted_at)
    assert losses == expected
    assert torch.equal(vectors(whole), vectors(second))


def test_a_peer_that_reads_its_data_piece_by_piece_is_bit_equal_too(tmp_path: Path) -> None:
    settings = harness.source("jsonl.gz", tmp_path)
    whole, first, second = (parts.peer_state() for _ in range(3))
    for state in (whole, first, second):
        state.stream = Prefetched(harness.stream(settings, 5), pin=False)
    expected = run(whole, 5 * H)
    losses = run(first, 2 * H + 3)
    resume(Checkpoints(tmp_path, 1), first, second)
    losses += run(second, 5 * H - 2 * H - 3)
    for state in (whole, first, second):
        state.stream.close()
    assert losses == expected
    assert torch.equal(vectors(whole), vectors(second))


def test_the_random_state_comes_back(tmp_path: Path) -> None:
    state = parts.peer_state()
    save_checkpoint(Checkpoints(tmp_path, 1), 0, state.scalars(), state.tensors())
    expected = torch.rand(3)
    torch.manual_seed(1)
    saved = Checkpoints(tmp_path, 1).newest()
    assert saved is not None
    state.restore(saved)
    assert torch.equal(torch.rand(3), expected)


def test_a_snapshot_is_a_copy_and_a_newcomer_starts_at_it() -> None:
    donor, newcomer = parts.peer_state(), parts.peer_state()
    run(donor, H)
    donor.counters.round, donor.counters.boundary_step = 1, H
    snapshot = donor.snapshot()
    phi = snapshot.vectors[0].clone()
    run(donor, H)
    assert torch.equal(snapshot.vectors[0], phi)

    newcomer.adopt(snapshot)
    assert torch.equal(theta(newcomer), phi) and torch.equal(newcomer.outer.slow.phi, phi)
    assert torch.equal(newcomer.outer.momentum, snapshot.vectors[1])  # type: ignore[arg-type]
    assert (newcomer.inner.step, newcomer.counters.round) == (H, 1)


def test_a_checkpoint_of_another_configuration_is_refused_with_advice_that_helps() -> None:
    """It advised another run.name, which is not in the folder's path."""
    state = parts.peer_state()
    assert state.refusal({"config": "digest"}) == ""
    advice = "choose another run.dir or peer.name, or set peer.checkpoint.resume: false to begin anew"
    assert f"{advice}; to go on with its weights, export it" in state.refusal({"config": "other"})
    assert "its configuration has the digest other, this one's digest" in state.refusal({"config": "other"})
    state._origin = {"run": RunConfig(inner_steps=20, steps=60).model_dump(mode="json")}
    other = {"config": "other", "origin": {"run": RunConfig(inner_steps=10, steps=60).model_dump(mode="json")}}
    assert state.refusal(other).startswith("is of another run: run.inner_steps is 20 here and 10 there; choose")


@pytest.mark.parametrize("steps", [40, 60, 600])
def test_a_run_may_get_another_length(steps: int) -> None:
    """Who had trained to the end could go on with an export and a new optimizer only."""
    state = parts.peer_state()
    state._origin = {"run": RunConfig(inner_steps=20, steps=60).model_dump(mode="json")}
    other = RunConfig(inner_steps=20, steps=steps)
    saved = {"config": digest(other), "origin": {"run": other.model_dump(mode="json")}}
    assert state.refusal(saved) == ""
    assert state.refusal({**saved, "config": "other"})  # another version wrote it


def renamed(net: Any) -> None:
    net.model.other, net.model.norm = net.model.norm, None


def reshaped(net: Any) -> None:
    net.model.norm.weight = torch.nn.Parameter(torch.ones(17))


def reordered(net: Any) -> None:
    """φ and δ are flat: their elements would be those of other weights."""
    layers = net.model.layers
    del net.model.layers
    net.model.layers = layers


def frozen(net: Any) -> None:
    net.model.norm.weight.requires_grad_(requires_grad=False)


def with_buffer(net: Any, size: int = 1) -> None:
    net.register_buffer("passes", torch.zeros(size))


def with_longer_buffer(net: Any) -> None:
    with_buffer(net, 2)


def nothing(net: Any) -> None: ...


def state_with(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> PeerState:
    net = parts.network()
    change(net)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "network", lambda: net)
        return parts.peer_state()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        *((nothing, it) for it in (renamed, reshaped, reordered, frozen, with_buffer)),
        (with_buffer, with_longer_buffer),
    ],
)
def test_a_checkpoint_of_a_model_with_other_weights_is_refused_in_one_line(
    before: Callable[[Any], None], now: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of transformers has them: each start ended in a traceback."""
    first, second = state_with(before, monkeypatch), state_with(now, monkeypatch)
    save_checkpoint(Checkpoints(tmp_path, 1), 0, first.scalars(), first.tensors())
    with pytest.raises(UserError, match="is of another model: names or shapes of its weights differ") as caught:
        Checkpoints(tmp_path, 1).newest(second.refusal)
    assert "set peer.checkpoint.resume: false to begin anew" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("before", [nothing, with_buffer])
def test_what_a_checkpoint_has_beyond_the_model_hinders_nobody(
    before: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that says nothing of its model: an earlier version wrote it."""
    first, second = state_with(before, monkeypatch), parts.peer_state()
    for left_out in ((), ("layout", "untrained")):
        scalars = {key: value for key, value in first.scalars().items() if key not in left_out}
        save_checkpoint(Checkpoints(tmp_path, 1), 0, scalars, first.tensors())
        saved = Checkpoints(tmp_path, 1).newest(second.refusal)
        assert saved is not None
        second.restore(saved)


@pytest.mark.parametrize("inner", INNER, ids=["adamw", "muon"])
def test_a_peer_that_came_back_too_late_starts_its_optimizer_anew(tmp_path: Path, inner: InnerConfig) -> None:
    donor, late = parts.peer_state(inner), parts.peer_state(inner)
    run(late, H)
    run(donor, 5 * H)
    donor.counters.round, donor.counters.boundary_step = 5, 5 * H
    back, fresh = parts.peer_state(inner), parts.peer_state(inner)
    resume(Checkpoints(tmp_path, 1), late, back)
    for newcomer in (back, fresh):
        newcomer.adopt(donor.snapshot())
    back.stream.position = fresh.stream.position
    assert run(back, 3) == run(fresh, 3)  # moments of weights that are long gone must not steer


def test_a_method_without_momentum_resumes_as_well(tmp_path: Path) -> None:
    first, second = parts.peer_state(), parts.peer_state()
    for state in (first, second):
        state.outer = Local(state.outer.slow)
    first.inner.run(first.stream.take(4))
    alone(first)
    assert len(first.snapshot().vectors) == 1
    resume(Checkpoints(tmp_path, 1), first, second)
    assert torch.equal(first.outer.slow.phi, second.outer.slow.phi)
    assert first.inner.run(first.stream.take(2)).loss == second.inner.run(second.stream.take(2)).loss


def test_what_rounding_has_kept_comes_back(tmp_path: Path) -> None:
    first, second = parts.peer_state(feedback=True), parts.peer_state(feedback=True)
    assert first.kept is not None and second.kept is not None
    first.kept.normal_()
    resume(Checkpoints(tmp_path, 1), first, second)
    assert torch.equal(first.kept, second.kept)


def with_more_than_weights() -> PeerState:
    """A frozen parameter, and a buffer that counts the forward passes."""
    state = parts.peer_state()
    net = state.inner.model
    net.register_parameter("frozen", torch.nn.Parameter(torch.randn(3), requires_grad=False))
    net.register_buffer("passes", torch.zeros((), dtype=torch.int64))
    net.register_buffer("same_memory", net.get_buffer("passes")[None])  # safetensors refuses it
    net.register_buffer("computed", torch.zeros(3), persistent=False)
    net.register_forward_pre_hook(lambda module, args: module.passes.add_(1) and None)
    return state


def test_what_is_not_trained_comes_back(tmp_path: Path) -> None:
    """Buffers that training changes began anew."""
    first, second = with_more_than_weights(), with_more_than_weights()
    run(first, 3)
    saved = resume(Checkpoints(tmp_path, 1), first, second)
    assert set(saved.tensors["untrained"]) == {"frozen", "passes", "same_memory"}
    passes, frozen = second.inner.model.get_buffer("passes"), second.inner.model.get_parameter("frozen")
    assert passes == 3 and torch.equal(frozen, first.inner.model.get_parameter("frozen"))
    assert run(first, H) == run(second, H)
    size = sum(value.nbytes for _, content in first.tensors() for value in content.values())
    assert first.checkpoint_bytes == pytest.approx(size, rel=0.01)
    model = sum(value.nbytes for name, content in first.tensors() if name in MODEL_PARTS for value in content.values())
    assert first.push_bytes == 2 * model


@pytest.mark.parametrize("inner", INNER, ids=["adamw", "muon"])
def test_a_move_to_a_device_without_room_keeps_all_moments(inner: InnerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause ended so: those that had not been moved were lost, and AdamW began anew for a part of the model."""
    state = parts.peer_state(inner)
    run(state, 3)
    before = {name: it.clone() for name, it in state.outer.slow.moments(state.inner.optimizer).items()}
    real, moves = torch.Tensor.to, itertools.count()

    def full(it: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        if next(moves) == len(before) - 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(it, *where, **how)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        state.move_to(torch.device("cpu"))
    after = state.outer.slow.moments(state.inner.optimizer)
    assert after.keys() == before.keys() and all(torch.equal(after[name], it) for name, it in before.items())


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("inner", INNER, ids=["adamw", "muon"])
def test_the_announced_size_is_the_size_on_the_disk(inner: InnerConfig, feedback: bool) -> None:
    state = parts.peer_state(inner, feedback=feedback)
    run(state, 1)
    size = sum(value.nbytes for _, content in state.tensors() for value in content.values())
    assert state.checkpoint_bytes == pytest.approx(size, rel=0.01)
