"""How a device copies: beside its work where it has streams, else every copy is complete when its call returns."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.config.schema import RunConfig
from peer.data.open import read_ahead
from peer.data.prefetch import Prefetched
from peer.device import copies
from peer.device.copies import copied_scalar, has_streams, host_zeros, pin_in_place, side_stream, synchronize, to_device
from peer.errors import UserError
from tests.unit import parts
from tests.unit.device.doubles import plug_in
from tests.unit.late_device import LateDevice

STREAMS = {"cpu": False, "cuda": True, "mps": False, "xpu": True}


@pytest.mark.parametrize(("kind", "streams"), STREAMS.items())
def test_what_has_streams_copies_beside_its_work(kind: str, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "module_of", lambda device: SimpleNamespace(Stream=lambda device: "a stream"))
    device = torch.device(kind)
    assert has_streams(device) is streams
    assert (side_stream(device) is not None) is streams
    ahead = read_ahead(RunConfig(), parts.stream(), device)
    assert isinstance(ahead, Prefetched) is streams


@pytest.mark.parametrize(("kind", "streams"), STREAMS.items())
def test_a_batch_is_waited_for_where_it_must_be(kind: str, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda it: asked.append("pinned") or it)
    monkeypatch.setattr(Tensor, "to", lambda it, device, non_blocking=False: asked.append((device, non_blocking)))
    to_device(torch.zeros(1), torch.device(kind))
    assert asked == ["pinned"] * streams + [(torch.device(kind), streams)]


def test_a_loss_is_read_without_waiting_where_there_are_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.tensor(1.5)
    known = copied_scalar(loss), copied_scalar(0.1)
    assert [it.arrived() for it in known] == [True, True] and [float(it.host) for it in known] == [1.5, 0.1]
    event = SimpleNamespace(done=False, query=lambda: event.done, synchronize=lambda: setattr(event, "done", True))
    with LateDevice(monkeypatch):
        stream = SimpleNamespace(record_event=lambda: event)
        monkeypatch.setattr(copies, "has_streams", lambda device: True)
        monkeypatch.setattr(copies, "module_of", lambda device: SimpleNamespace(current_stream=lambda device: stream))
        late = copied_scalar(loss)
        assert not late.arrived()
        assert late.arrived(wait=True) and event.done and late.arrived() and float(late.host) == 1.5


@pytest.mark.parametrize("kind", STREAMS)
def test_only_cuda_pins_memory_that_torch_has_not_allocated(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, registered = torch.zeros(3), []
    driver = SimpleNamespace(cudaHostRegister=lambda *it: registered.append(it) or 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    launched = []

    def raises(*_: Any, **__: Any) -> Tensor:
        launched.append(1)
        raise RuntimeError("CUDA error: the one of before")

    monkeypatch.setattr(torch, "zeros", raises)
    pin_in_place(memory, torch.device(kind))
    assert registered == [(memory.data_ptr(), 12, 0)] * (kind == "cuda")
    assert launched == [1] * (kind == "cuda")  # the error does not wait for an innocent kernel
    assert ("cannot be pinned" in caplog.text) == (kind == "cuda")


@pytest.mark.parametrize("kind", STREAMS)
def test_an_accelerator_is_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    plug_in(monkeypatch, None if kind == "cpu" else kind)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronize(torch.device(kind))
    assert waited == [torch.device(kind)] * (kind != "cpu")


def test_a_host_without_room_for_pinned_memory_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a traceback, or in advice about the accelerator's memory."""

    def no_room(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch, "zeros", no_room)
    with pytest.raises(UserError, match=r"the host gives no 4\.00 GiB of memory that the accelerator copies from"):
        host_zeros(2**30, torch.device("cuda"))
