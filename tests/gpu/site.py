"""Where the checks run, the replicas that they run, and what they find."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.config import load
from peer.config.schema import Config
from peer.data import corpus
from peer.data.corpus import Corpus
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext
from peer.training import replica
from peer.training.state import PeerState

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
DEMO = CONFIGS / "demo.yaml"
TINY = (  # 40,000 parameters: a step takes milliseconds on a CPU
    "run.model.hidden_size=32",
    "run.model.intermediate_size=96",
    "run.model.layers=2",
    "run.data.sequence_length=32",
    "run.batch_size=4",
    "peer.threads=1",
)
MIDDLE = (  # 13M parameters: 50 parts of 1 MiB
    "run.model.hidden_size=512",
    "run.model.intermediate_size=1376",
    "run.model.layers=4",
    "run.data.sequence_length=512",
    "run.batch_size=16",
)
_TEXTS: dict[str, Corpus] = {}
BACKLOG = 60  # products of two matrices of 4096 x 4096: about 0.1 s of a fast card


@dataclass(frozen=True)
class Site:
    """``device``: where to compute. ``timed``: durations and memory are judged, as on an accelerator; on a CPU only the
    arithmetic is. ``folder``: for files of the checks.
    """

    device: torch.device
    folder: Path
    timed: bool

    @property
    def accelerator(self) -> bool:
        return self.device.type == "cuda"

    @property
    def small(self) -> tuple[str, ...]:
        """Overrides for a model that is small on this device."""
        return (*(MIDDLE if self.accelerator else TINY), f"peer.device={self.device.type}")

    def config(self, *overrides: str, files: tuple[Path, ...] = (DEMO,)) -> Config:
        """Of the small model, unless ``files`` name a preset."""
        return load.load(list(files), [*(self.small if files == (DEMO,) else ()), *overrides], environment={})

    def replica(self, config: Config, stream: int = 1) -> PeerState:
        """On the device, with the run's initial weights."""
        train = text(config).train
        return replica.replica(config, train, stream=stream, device=self.device, context=LoopContext())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.accelerator:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give back what earlier checks took: compiled code and cycles of objects keep their tensors."""
        torch._dynamo.reset()
        gc.collect()
        if self.accelerator:
            torch.cuda.empty_cache()

    def keep_busy(self) -> torch.cuda.Event | None:
        """Queue work for a tenth of a second; its event is done after it. ``None`` on a CPU, which has no queue."""
        if not self.accelerator:
            return None
        left = torch.ones(4096, 4096, device=self.device)
        for _ in range(BACKLOG):
            torch.mm(left, left)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def busy_seconds(self) -> float:
        """That the device takes for what :meth:`keep_busy` queues."""
        self.keep_busy()  # the first product of a process loads a library
        self.synchronize()
        began = time.monotonic()
        self.keep_busy()
        self.synchronize()
        return time.monotonic() - began


@dataclass(frozen=True)
class Finding:
    """``right``: ``None`` when this could not be checked here, and ``words`` say why. ``check``: set when it is run.
    ``reached``: not where the time was over before.
    """

    subject: str
    right: bool | None
    words: str
    figures: dict[str, Any] = field(default_factory=dict)
    check: str = ""
    reached: bool = True

    def line(self) -> str:
        verdict = {True: "ok", False: "WRONG", None: "left out"}[self.right]
        return f"{verdict:<9}{self.subject}: {self.words}"


def no_network() -> str:
    """The module that the peer-to-peer network lacks here; empty when it is there."""
    try:
        importlib.import_module("peer.training.assemble")
        importlib.import_module("hivemind.utils.multiaddr.codecs.cid")  # hivemind does so at the first address
    except ModuleNotFoundError as error:
        return error.name or str(error)
    return ""


def text(config: Config) -> Corpus:
    """The data of a run, read once."""
    key = config.run.data.model_dump_json()
    if key not in _TEXTS:
        _TEXTS[key] = corpus.load(config.run.data)
    return _TEXTS[key]


def fast(slow: SlowWeights) -> Tensor:
    """A copy of θ, flat fp32 on the host."""
    out = torch.empty(slow.numel)
    slow.read_fast(0, out)
    return out


def off(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖other‖ in fp64."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))


@contextmanager
def one_thread() -> Iterator[None]:
    """On the host: a sum has the same bits in every thread, and threads that compute do not wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def repeatable() -> Iterator[None]:
    """The same bits from the same inputs, where torch has such a kernel: for checks to the bit."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
