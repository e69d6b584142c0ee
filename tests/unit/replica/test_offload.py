"""AdamW on the host is, to the bit, the AdamW of the device; on the CPU both are the same arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from peer.config.schema import Config, InnerConfig, PeerConfig, RunConfig
from peer.device import copies
from peer.errors import UserError
from peer.outer.slow_weights import SlowWeights
from peer.replica import inner_loop, offload
from peer.replica.offload import HostCopies
from peer.replica.optimizer import inner_optimizer
from peer.replica.sharded.launch import require_fit
from peer.training.checkpoint import Checkpoints
from peer.training.state import PeerState
from tests.saved import resume
from tests.unit import parts
from tests.unit.late_device import LateDevice
from tests.unit.parts import alone, theta

H = 3  # inner steps


def run(state: PeerState, steps: int) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of each step; an outer step every H of them."""
    seen = []
    for _ in range(steps):
        report = state.inner.run(state.stream.take(1))
        seen.append((report.loss, report.grad_norm))
        if state.inner.step % H == 0:
            alone(state)
    return seen


def assert_same(one: PeerState, other: PeerState) -> None:
    assert torch.equal(theta(one), theta(other)) and torch.equal(one.outer.slow.phi, other.outer.slow.phi)
    moments, expected = (it.outer.slow.moments(it.inner.optimizer) for it in (one, other))
    assert moments.keys() == expected.keys() and len(expected) == 3 * len(one.outer.slow.spans)
    assert all(torch.equal(moments[key], value) for key, value in expected.items())


@pytest.mark.parametrize("how", [{}, {"micro_batch": 2}, {"micro_batch": 1}, {"autocast": True}], ids=str)
def test_a_peer_trains_to_the_bit_as_without_it(how: dict[str, Any]) -> None:
    plain, offloaded = parts.peer_state(**how), parts.peer_state(offload=True, **how)
    assert run(offloaded, 3 * H + 1) == run(plain, 3 * H + 1)
    assert_same(offloaded, plain)
    assert all(it.grad is None for it in offloaded.inner.model.parameters())


def test_a_part_that_a_swap_corrects_between_two_steps_is_seen() -> None:
    plain, offloaded = parts.peer_state(), parts.peer_state(offload=True)
    for state in (plain, offloaded):
        run(state, 1)
        state.outer.slow.shift(torch.full((500,), 0.01), 700)
        run(state, 1)
    assert_same(offloaded, plain)


@pytest.mark.parametrize("saved_with", [False, True], ids=["saved without", "saved with"])
@pytest.mark.parametrize("resumed_with", [False, True], ids=["resumed without", "resumed with"])
def test_a_checkpoint_resumes_with_and_without_it(saved_with: bool, resumed_with: bool, tmp_path: Path) -> None:
    whole, first = parts.peer_state(), parts.peer_state(offload=saved_with)
    second = parts.peer_state(offload=resumed_with)
    run(second, 1)  # what it had is replaced
    expected = run(whole, 3 * H)
    losses = run(first, H + 1)
    resume(Checkpoints(tmp_path, 1), first, second)
    assert losses + run(second, 2 * H - 1) == expected
    assert_same(second, whole)


@pytest.mark.parametrize("steps", [1, H], ids=["within a phase", "at a boundary"])
@pytest.mark.parametrize("offload", [False, True], ids=["without", "with"])
def test_a_pause_changes_no_bit(offload: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the model gets other memory, and what it had is no more: to the host, and back to the device."""
    whole, paused = parts.peer_state(micro_batch=2), parts.peer_state(micro_batch=2, offload=offload)
    expected, model, moves = run(whole, 2 * H + 1), paused.inner.model, []

    def move(device: torch.device) -> None:
        before = [it.data for it in model.parameters()]
        model._apply(torch.clone)
        for memory in before:
            memory.fill_(torch.nan)
        moves.append(device)

    monkeypatch.setattr(model, "to", move)
    seen = run(paused, steps)
    for kind in ("cpu", "cuda"):  # as peer/training/pausing/rest.py does
        paused.move_to(torch.device(kind))
    assert seen + run(paused, 2 * H + 1 - steps) == expected and len(moves) == 2
    assert_same(paused, whole)


def test_an_optimizer_that_forgets_starts_anew() -> None:
    plain, offloaded = parts.peer_state(), parts.peer_state(offload=True)
    for state in (plain, offloaded):
        run(state, 2)
        state.forget()
        assert state.outer.slow.moments(state.inner.optimizer) == {}
    assert run(offloaded, 2) == run(plain, 2)
    assert_same(offloaded, plain)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_gradients_that_arrive_late_are_waited_for(micro_batch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = parts.peer_state(micro_batch=micro_batch)
    run(plain, H - 1)
    with LateDevice(monkeypatch) as device:
        for module in (copies, offload):
            monkeypatch.setattr(module, "has_streams", lambda device: True)
        monkeypatch.setattr(inner_loop, "to_device", lambda batch, device: batch)
        net = parts.network()
        late = parts.inner_loop(net, micro_batch=micro_batch, offload=True)
        stream = parts.stream()
        for _ in range(H - 1):
            late.run(stream.take(1))
    assert device.calls.count("download") == (H - 1) * (1 if micro_batch is None else 2) * len(list(net.parameters()))
    own = torch.cat([it.detach().reshape(-1) for it in net.parameters()])
    assert torch.equal(own, theta(plain))


def test_the_moments_of_a_checkpoint_never_come_to_the_device() -> None:
    net = parts.network().to("meta")
    slow = SlowWeights(net.named_parameters(), torch.zeros(sum(it.numel() for it in net.parameters())))
    optimizer = inner_optimizer(net, InnerConfig(), copies=HostCopies(net.parameters()))
    name = slow.spans[0].name
    slow.take_moments(optimizer, {f"{name}/exp_avg": torch.ones(slow.spans[0].parameter.shape)})
    assert slow.moments(optimizer)[f"{name}/exp_avg"].device.type == "cpu"


def test_muon_and_ranks_are_refused_in_one_line() -> None:
    own = PeerConfig(offload="optimizer")
    with pytest.raises(ValidationError, match=r"peer\.offload: optimizer is for AdamW.*muon; set none"):
        Config(run=RunConfig(inner=InnerConfig(optimizer="muon")), peer=own)
    with pytest.raises(UserError, match=r"peer\.offload is for a peer of one rank; set it to none"):
        require_fit(Config(peer=own), 2, None)


@pytest.mark.parametrize("room", [0, 2**30])
def test_gradients_that_are_being_copied_do_not_pile_up_on_the_device(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host runs ahead of the device: those of a whole model were there at once."""
    monkeypatch.setattr(offload, "UNDER_WAY_BYTES", room)
    weights = [torch.nn.Parameter(torch.zeros(10)) for _ in range(6)]
    with LateDevice(monkeypatch) as device:
        host = HostCopies(weights)
        host._side = copies.SideStream(torch.device("cpu"))
        sum(it.sum() for it in weights).backward()  # type: ignore[union-attr]
        assert ("host waits" in device.calls, len(host._coming) > 2) == ((False, True) if room else (True, False))
        host.collect()
    assert host._under_way == 0 and all(torch.equal(it.grad, torch.ones(10)) for it in host.of.values())  # type: ignore[arg-type]


def test_the_bound_of_gradients_under_way() -> None:
    mib = 2**20
    assert offload.under_way_bytes([10 * mib] * 6) == 60 * mib
    assert offload.under_way_bytes([10 * mib] * 100) == 266 * mib
    assert offload.under_way_bytes([10 * mib, 900 * mib, 800 * mib]) == 1700 * mib
