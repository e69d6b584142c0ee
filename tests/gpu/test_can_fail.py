"""Each check finds what it is there for: the code that it guards is broken, and a finding is wrong."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.commands.simulate import exchanges
from peer.data.batches import TokenStream
from peer.exchange.modulo import Modulo
from peer.exchange.pair import blocking, protocol
from peer.exchange.pair.mailbox import SwapMailbox
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.replica import inner_loop, offload
from peer.replica.inner_loop import InnerLoop
from peer.replica.memory import Memory
from peer.replica.offload import HostCopies
from peer.replica.sharded.weights import GatheredWeights
from peer.training.state import PeerState
from tests.gpu.checks import copies, memory, network, out_of_memory, resume, sharing, speed, step_share
from tests.gpu.run import findings, verdict
from tests.gpu.site import TINY, Finding, Site
from tests.unit.parts import no_compiler

Patch = pytest.MonkeyPatch
LATE = 0.2  # seconds
STARVED = "error: CUDA out of memory; lower peer.micro_batch (now 4), or set peer.offload: optimizer\n"


def wrong(folder: Path, check: str, *, timed: bool = False) -> list[str]:
    """The subjects of what is wrong."""
    torch.set_num_threads(1)
    found = findings(Site(torch.device("cpu"), folder, timed), [check])
    return [it.subject for it in found if it.right is False]


def nothing(*args: Any, **options: Any) -> None:
    pass


class CardOnPaper(Site):
    """A CPU that the checks take for an accelerator."""

    accelerator = True  # type: ignore[assignment]
    small = (*TINY, "peer.device=cpu")  # type: ignore[assignment]

    def synchronize(self) -> None:
        pass


def late(work: Callable[..., None]) -> Callable[..., None]:
    """As a copy that is not waited for: it reads its source after the call has returned."""
    return lambda *args: threading.Timer(LATE, work, args).start()


# -- copies


@pytest.mark.parametrize("name", ["write_fast", "add_to_fast"])
def test_a_copy_that_is_not_waited_for(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    real, host = getattr(SlowWeights, name), threading.Event()
    device_only = late(real)

    def changed(self: SlowWeights, *args: Any) -> None:
        """Late on every other outer method: the twin on the CPU is the measure."""
        (real if host.is_set() else device_only)(self, *args)
        host.clear() if host.is_set() else host.set()

    monkeypatch.setattr(SlowWeights, name, changed)
    assert wrong(tmp_path, "copies")


def test_a_batch_with_other_targets(tmp_path: Path, monkeypatch: Patch) -> None:
    from tests.gpu.checks import copies

    def shifted(model: Any, batch: Tensor, device: torch.device, autocast: bool) -> Tensor:
        return inner_loop.batch_loss(model, batch.roll(1, 1), device, autocast)

    monkeypatch.setattr(copies, "batch_loss", shifted)
    assert wrong(tmp_path, "copies") == ["batches, float32"]


# -- sharing


@pytest.fixture
def few_codecs(monkeypatch: Patch) -> None:
    """Two peers, and the codecs that are needed."""
    monkeypatch.setattr(sharing, "MEETINGS", {2: [[(0, 1)]]})
    monkeypatch.setattr(sharing, "CODECS", ("none", "int4"))
    monkeypatch.setattr(sharing, "ROUNDS", 2)


@pytest.mark.usefixtures("few_codecs")
@pytest.mark.parametrize(
    ("target", "name", "broken", "subjects"),
    [
        (blocking, "blend", lambda own, theirs, share: theirs.mul_(0.4).add_(own, alpha=0.6), ["blocking"]),
        (protocol, "share", lambda theirs, own: 0.4, ["blocking", "overlapped"]),
        (Modulo, "learn", nothing, ["blocking", "overlapped"]),
        (NoLoCo, "amend", nothing, ["overlapped"]),
    ],
    ids=["blend", "share", "learn", "amend"],
)
def test_weights_that_are_not_the_simulators(
    target: Any, name: str, broken: Any, subjects: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(target, name, broken)
    assert set(wrong(tmp_path, "sharing")) == {f"2 peers, {it}" for it in subjects}


@pytest.mark.usefixtures("few_codecs")
def test_an_outer_step_that_is_not_the_formulas(tmp_path: Path, monkeypatch: Patch) -> None:
    """Peers and simulator share the method, so only the formula in fp64 can find this."""

    def without_gamma(self: NoLoCo, mean: Tensor) -> None:
        self.momentum.mul_(self.settings.alpha).add_(mean).sub_(self.slow.phi)
        self.slow.phi.add_(self.momentum)
        self.slow.write_fast()

    monkeypatch.setattr(NoLoCo, "apply", without_gamma)
    assert wrong(tmp_path, "sharing") == ["2 peers, blocking"]


# -- resume


@pytest.mark.parametrize(
    ("target", "name"),
    [(SlowWeights, "take_moments"), (PeerState, "take_outer"), (TokenStream, "resume")],
    ids=["moments", "outer", "position"],
)
def test_a_state_that_does_not_come_back(target: Any, name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(target, name, nothing)
    assert wrong(tmp_path, "resume") == ["resume in fp32", "resume in bf16"]


def test_a_pause_that_loses_something(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(PeerState, "move_to", lambda state, device: state.forget())
    assert wrong(tmp_path, "resume") == ["pause in fp32", "pause in bf16", "pause in fp32 with offload"]


@pytest.mark.parametrize("released", [True, False])
def test_a_pause_that_keeps_the_memory(released: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    """Memory that torch keeps for later is free to torch alone: the measure was the bytes of tensors."""
    used = {"tensors": 2**30, "reserved": 2**30}
    site = CardOnPaper(torch.device("cpu"), tmp_path, timed=False)

    def moved(state: PeerState, device: torch.device) -> None:
        used["tensors"] ^= 2**30

    def empty(device: torch.device | None = None) -> None:
        used["reserved"] = used["tensors"]

    monkeypatch.setattr(PeerState, "move_to", moved)
    monkeypatch.setattr(resume, "release_memory", empty if released else nothing)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used["tensors"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: used["reserved"])
    config = site.config(f"run.inner_steps={resume.H}", "run.inner.warmup_steps=0")
    assert resume._paused(site, config, "fp32").right is released


# -- offload


def test_an_offloaded_optimizer_that_misses_a_change(tmp_path: Path, monkeypatch: Patch) -> None:
    refresh = HostCopies.refresh

    def once(self: HostCopies) -> None:
        if not self._versions:
            refresh(self)

    monkeypatch.setattr(HostCopies, "refresh", once)
    assert wrong(tmp_path, "offload") == ["offload", "offload, two micro-batches"]


def test_an_offloaded_optimizer_that_keeps_the_last_gradient_only(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(offload, "_accumulate", lambda copy, gradient: setattr(copy, "grad", gradient))
    assert wrong(tmp_path, "offload") == ["offload, two micro-batches"]


# -- memory


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (1, "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory\n"),
        (1, f"{STARVED}error: and another one\n"),
        (0, STARVED),
        (1, "error: CUDA out of memory\n"),
    ],
)
def test_an_end_that_is_not_one_line(code: int, output: str) -> None:
    assert out_of_memory.judged("it", 1, STARVED).right
    assert not out_of_memory.judged("it", code, output).right


@pytest.mark.parametrize(
    ("free", "resident", "right"), [(90, 50, True), (95, 50, False), (80, 50, False), (90, 70, False)]
)
def test_an_estimate_that_is_not_kept(free: int, resident: int, right: bool) -> None:
    """On a device with 100 bytes: 10 are estimated of it, and 60 of the host, 5 of them for a checkpoint."""
    estimated = Memory(10, 60, {"checkpoint": 5}, 0, 0)
    used = {"free": free, "held": 9, "resident": resident}
    assert memory.judged("it", estimated, False, 100, used).right is right
    assert memory.judged("it", estimated, True, 0, {"resident": 70}).right
    assert not memory.judged("it", estimated, True, 0, {"resident": 85}).right


# -- ranks, the swap's share, speed, network


def test_ranks_that_keep_their_weights(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(GatheredWeights, "apply", nothing, raising=False)
    real = GatheredWeights.write_fast
    calls: list[int] = []

    def once(self: GatheredWeights, *args: Any) -> None:
        """The initial weights reach the ranks, and nothing after them."""
        if not calls:
            real(self, *args)
        calls.append(1)

    monkeypatch.setattr(GatheredWeights, "write_fast", once)
    assert "two ranks over gloo in fp32" in wrong(tmp_path, "ranks")


def test_a_correction_that_is_lost(tmp_path: Path, monkeypatch: Patch) -> None:
    take = SwapMailbox.take_corrections
    monkeypatch.setattr(SwapMailbox, "take_corrections", lambda self: take(self)[1:])
    monkeypatch.setattr(step_share, "check", lambda site: iter([step_share._measured(site, "none")]))
    assert wrong(tmp_path, "step_share") == ["swap's share of a step, none"]


class NoQueue(CardOnPaper):
    """Its queue is over at once, so every look takes longer."""

    def keep_busy(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def busy_seconds(self) -> float:
        return 0.0


@pytest.mark.parametrize("lost", [False, True])
def test_looks_that_tell_nothing_are_left_out(lost: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    """It was ok that none of 0 looks had waited."""
    torch.set_num_threads(1)
    on_cpu = step_share._config(Site(torch.device("cpu"), tmp_path, timed=False), "none")
    monkeypatch.setattr(step_share, "_config", lambda site, codec: on_cpu)
    if lost:
        take = SwapMailbox.take_corrections
        monkeypatch.setattr(SwapMailbox, "take_corrections", lambda self: take(self)[1:])
    found = step_share._measured(NoQueue(torch.device("cpu"), tmp_path, timed=True), "none")
    assert found.right is (False if lost else None)
    assert ("no look was so much shorter" in found.words) is not lost


class QueueingDevice:
    """A device and a host in virtual time. Its queue takes ``BUSY`` seconds."""

    BUSY = 0.1

    def __init__(self) -> None:
        self.now = self._ends = 0.0

    def monotonic(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.now = max(self.now, self._ends)

    def keep_busy(self) -> SimpleNamespace:
        ends = self._ends = self.now + self.BUSY
        return SimpleNamespace(query=lambda: self.now >= ends)

    def busy_seconds(self) -> float:
        return self.BUSY

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("seconds", "waits", "judged", "drained"),
    [(0.01, False, 4, 0), (0.01, True, 4, 4), (0.09, False, 0, 0), (0.2, False, 0, 0)],
    ids=["it does not wait", "it waits", "nearly as long as the queue", "longer than the queue"],
)
def test_a_look_that_waits_for_the_device(
    seconds: float, waits: bool, judged: int, drained: int, monkeypatch: Patch
) -> None:
    """No such look was ever counted: what waits for the queue takes longer than the queue, as what has more to do."""
    device, looks = QueueingDevice(), iter([None] * 20 + ["merged"])

    def look(*args: Any, **options: Any) -> None:
        device.work(seconds)
        if waits:
            device.synchronize()

    mailbox = SimpleNamespace(parts=[(0, 1)], parts_to_open=lambda idle=False: range(1), result=lambda: next(looks))
    peer: Any = SimpleNamespace(exchange=SimpleNamespace(start=lambda meet: mailbox), method=None)
    for name, double in (
        ("time", device),
        ("partner", lambda *args: contextlib.nullcontext()),
        ("PartOpening", nothing),
        ("amend_parts", lambda *args: 0),
        ("open_parts", look),
        ("_step", lambda *args: 0.1),
    ):
        monkeypatch.setattr(step_share, name, double)
    site: Any = device
    swap = step_share.Swap(site, peer, site, "none")
    swap.run(0.1, queued=True)
    assert (swap.judged, swap.drained) == (judged, drained)


def test_a_slow_loop_another_loop_and_one_that_is_not_compiled(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(speed, "MODES", (speed.Mode("fp32"),))
    update, backward = InnerLoop._update, InnerLoop._backward
    with monkeypatch.context() as patch:
        patch.setattr(InnerLoop, "_update", lambda self, rate: (time.sleep(0.02), update(self, rate)))
        assert wrong(tmp_path, "speed") == []  # on a CPU durations are not judged
        assert wrong(tmp_path, "speed", timed=True) == ["fp32"]
    with monkeypatch.context() as patch:
        patch.setattr(InnerLoop, "_backward", lambda self, batch: backward(self, batch[:2]))
        assert wrong(tmp_path, "speed") == ["fp32"]
    monkeypatch.setattr(speed, "MODES", (speed.Mode("fp32", compile=True),))
    with no_compiler():
        assert wrong(tmp_path, "speed") == ["fp32 compile"]


def test_peers_on_a_network_that_weigh_otherwise(tmp_path: Path, monkeypatch: Patch) -> None:
    """Unlike shares: with equal ones the mean of both stays, and where every round merges both come back to it."""
    pytest.importorskip("hivemind")
    shares = itertools.cycle((0.3, 0.6))  # of a swap's first and second side; no partner's share is above a half
    monkeypatch.setattr(exchanges, "share", lambda theirs, own: next(shares))
    monkeypatch.setattr(network, "check", lambda site: iter([network._blocking(site, 2, "none")]))
    assert wrong(tmp_path, "network") == ["2 processes, blocking, none"]


# -- the run


def test_what_breaks_or_is_late_is_wrong(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(torch.device("cpu"), tmp_path, timed=False)
    monkeypatch.setattr(out_of_memory, "check", lambda site: 1 / 0)
    broken = list(findings(site, ["out_of_memory"]))
    assert [(it.right, it.words) for it in broken] == [(False, "ZeroDivisionError: division by zero")]
    assert [it.right for it in findings(site, ["copies"], limit=-1)] == [False]
    ok, left_out = Finding("a", True, ""), Finding("b", None, "")
    assert [verdict(it, 1.0) for it in ([ok, left_out], [ok, *broken], [left_out])] == [0, 1, 1]
    assert capsys.readouterr().out.splitlines()[0] == "gpu-test: 1 right, 0 wrong, 1 left out, in 1 s"


def test_a_check_that_lacks_a_package_is_a_finding_and_the_others_run(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "tests.gpu.checks.sharing", None)  # as its import fails
    site = Site(torch.device("cpu"), tmp_path, timed=False)
    found = list(findings(site, ["sharing", "copies"]))
    assert found[0].right is False and "ModuleNotFoundError" in found[0].words and len(found) > 2


def test_the_outer_step_of_a_device_with_streams_has_the_bits_of_its_twin(tmp_path: Path) -> None:
    """θ + (φ − θ) is not φ to the bit: the check said WRONG on every accelerator."""
    twins = copies.Twins(Site(torch.device("cpu"), tmp_path, timed=False))
    for outer in (twins.here, twins.there):
        outer.slow._side = copies.HostSide()  # type: ignore[assignment]
    assert copies._outer(twins.site, twins, "part by part", copies._part_by_part).right
    twins.here.slow._side = None
    assert not copies._outer(twins.site, twins, "part by part", copies._part_by_part).right
