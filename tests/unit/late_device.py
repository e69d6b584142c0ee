"""An accelerator on the CPU whose copies complete late, for code that uses a side stream (device/copies.py).

Host code is the compute stream: what it computes is done at once. A copy on another stream is done when it must be: to
the host when the test says :meth:`LateDevice.complete` or an event is waited for, to the device when the compute stream
waits for it. It reads its source then. What it fills is NaN before, and for ever if it did not wait for its source.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peer.device import copies
from peer.device.copies import SideStream
from peer.outer.slow_weights import SlowWeights

aten = torch.ops.aten


class Event:
    """After a copy to the host."""

    def __init__(self, device: LateDevice, number: int) -> None:
        self._device, self._number = device, number

    def query(self) -> bool:
        return self._device.completed >= self._number

    def synchronize(self) -> None:
        self._device.calls.append("host waits")
        self._device.complete()


class Stream:
    def __init__(self, device: LateDevice, name: str) -> None:
        self._device, self.name = device, name
        self.seen = 0  # work of the compute stream that it has waited for

    def wait_stream(self, other: Stream) -> None:
        self._device.calls.append(f"{self.name} waits for {other.name}")
        if self.name == "compute":
            self._device.run(self._device.uploads)
        else:
            self.seen = self._device.computed

    def record_event(self) -> Event:
        return Event(self._device, self._device.begun)


class LateDevice(TorchDispatchMode):
    """Entered while the code under test runs. ``calls``: what it asked of the device, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.downloads: deque[Callable[[], Any]] = deque()
        self.uploads: deque[Callable[[], Any]] = deque()
        self.begun = self.completed = 0  # copies to the host
        self.computed = 0
        self._made: dict[int, int] = {}  # by address: the work of the compute stream that made it
        self._pinned: list[Tensor] = []  # kept, so that no address is used again
        self._compute = self._current = Stream(self, "compute")
        names = itertools.cycle(("down", "up"))  # a side stream has one each way
        module = SimpleNamespace(
            Stream=lambda device: Stream(self, next(names)),
            current_stream=lambda device: self._current,
            stream=self._use,
        )
        monkeypatch.setattr(copies, "module_of", lambda device: module)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.calls.append("memory is kept"))

    def side_of(self, slow: SlowWeights) -> None:
        """The weights are on this device from now on."""
        slow._side = SideStream(torch.device("cpu"))

    def complete(self) -> None:
        """All copies to the host are done."""
        self.run(self.downloads)
        self.completed = self.begun

    def run(self, copies: deque[Callable[[], Any]]) -> None:
        while copies:
            copies.popleft()()

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            out = func(*args, **kwargs)
            self._pinned.append(out if func is aten.zeros.default else out.fill_(torch.nan))
            return out
        if func is aten.copy_.default and self._current is not self._compute:
            return self._copy(*args)
        out = func(*args, **kwargs)
        self.computed += 1
        if isinstance(out, Tensor):
            self._made[out.data_ptr()] = self.computed
        return out

    def _copy(self, out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking, "the host waits for this copy"
        out.fill_(torch.nan)
        self._pinned.append(source)
        if any(out.data_ptr() == it.data_ptr() for it in self._pinned):
            self.calls.append("download")
            self.begun += 1
            if self._made.get(source.data_ptr(), 0) <= self._current.seen:
                self.downloads.append(lambda: out.copy_(source))
        else:
            self.calls.append("upload")
            assert any(source.data_ptr() == it.data_ptr() for it in self._pinned[:-1]), "not from pinned memory"
            self.uploads.append(lambda: out.copy_(source))
        return out
