"""A peer's inner loop against a bare PyTorch loop: the same losses, and at least 98% of its tokens/s.

Both train the preset of 125M in each mode, alternately in blocks of half a second; a ratio is of one pair of blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from peer.config.schema import Config
from peer.data.open import read_ahead
from peer.device.accelerator import wants_bf16
from peer.logs import LOGGER
from peer.training.state import PeerState
from tests.benchmarks.bare_loop import BareLoop
from tests.gpu.site import CONFIGS, Finding, Site, text

LEAST = 0.98  # of the bare loop's tokens/s
PAIRS, BLOCK_SECONDS = 15, 0.5
STEPS = 4  # whose losses are compared, on the same batches from the same weights
SAME = {"fp32": 1e-3, "bf16": 2e-2}  # relative difference of two losses; kernels add in any order
SAME_ON_CPU = 1e-5
ROOMY = 60 * 2**30  # bytes of a card that takes the preset's micro-batch of 8


@dataclass(frozen=True)
class Mode:
    precision: str
    compile: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        more = (" compile" * self.compile) + (" gradient_checkpointing" * self.checkpointing)
        return self.precision + more

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"peer.precision={self.precision}",
            f"peer.compile={str(self.compile).lower()}",
            f"peer.gradient_checkpointing={str(self.checkpointing).lower()}",
        )


MODES = (
    Mode("bf16"),
    Mode("bf16", checkpointing=True),
    Mode("bf16", compile=True),
    Mode("fp32"),
    Mode("fp32", compile=True, checkpointing=True),
)


def check(site: Site) -> Iterator[Finding]:
    peaks: dict[Mode, int] = {}
    for mode in MODES:
        yield _compare(site, mode, peaks)
    if site.accelerator:
        plain, less = peaks[Mode("bf16")], peaks[Mode("bf16", checkpointing=True)]
        words = f"{less / 2**30:.1f} GiB at its peak with gradient checkpointing, {plain / 2**30:.1f} without"
        yield Finding("gradient checkpointing", less < plain, words, {"peak_bytes": less, "plain_peak_bytes": plain})


def _compare(site: Site, mode: Mode, peaks: dict[Mode, int]) -> Finding:
    config = _config(site, mode)
    site.free()
    if site.accelerator:
        torch.cuda.reset_peak_memory_stats(site.device)
    state = site.replica(config)
    batches = list(state.stream.take(STEPS))
    with warnings_of_compile() as said:
        own = [state.inner.run([batch]).loss for batch in batches]
    if said:
        return Finding(str(mode), False, said[0])
    if site.accelerator:
        peaks[mode] = torch.cuda.max_memory_allocated(site.device)
    bare = _bare(site, config)
    difference = max(abs(one - other) / other for one, other in zip(own, bare.run(batches), strict=True))
    same = difference <= (SAME[mode.precision] if site.accelerator else SAME_ON_CPU)
    ratios, tokens = _ratios(site, config, state, bare)
    figures = {
        "loss_difference": difference,
        "tokens_per_s_ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "tokens_per_s": tokens,
    }
    words = (
        f"{median(ratios):.2%} of a bare loop's tokens/s ({min(ratios):.1%} to {max(ratios):.1%} in {len(ratios)} "
        f"pairs), {tokens:,.0f} tokens/s; losses differ by {difference:.1e}"
    )
    return Finding(str(mode), same and (fast_enough(ratios) or not site.timed), words, figures)


def fast_enough(ratios: list[float]) -> bool:
    return median(ratios) >= LEAST


def _config(site: Site, mode: Mode) -> Config:
    if not site.accelerator:
        return site.config(*mode.overrides, "peer.micro_batch=2")
    roomy = torch.cuda.get_device_properties(site.device).total_memory >= ROOMY
    sizes = ("run.batch_size=16", f"peer.micro_batch={8 if roomy else 2}")
    preset = CONFIGS / "models" / "llama-125m.yaml", CONFIGS / "methods" / "noloco.yaml"
    return site.config(*mode.overrides, *sizes, files=preset)


def _bare(site: Site, config: Config) -> BareLoop:
    twin = site.replica(config).inner  # for its weights and its optimizer's groups of parameters
    found = torch.from_numpy(text(config).in_memory)
    bf16 = wants_bf16(config.peer.precision, site.device)
    return BareLoop(twin.model, twin.optimizer, config, found, autocast=bf16, compiled=config.peer.compile)


def _ratios(site: Site, config: Config, state: PeerState, bare: BareLoop) -> tuple[list[float], float]:
    """Of each pair of blocks the peer's tokens/s divided by the bare loop's; and the peer's median tokens/s."""
    state.stream = read_ahead(config.run, state.stream, site.device)
    try:
        run = {"peer": lambda it: state.inner.run(state.stream.take(it)), "bare": lambda it: bare.run(bare.batches(it))}
        for works in run.values():
            _seconds(site, works, 2)  # compiles
        steps = max(2, round(BLOCK_SECONDS / _seconds(site, run["bare"], 2) * 2)) if site.accelerator else 2
        ratios, speeds = [], []
        for pair in range(PAIRS if site.timed else 2):
            order = ("peer", "bare") if pair % 2 else ("bare", "peer")
            seconds = {kind: _seconds(site, run[kind], steps) for kind in order}
            ratios.append(seconds["bare"] / seconds["peer"])
            speeds.append(steps * config.run.batch_size * config.run.data.sequence_length / seconds["peer"])
        return ratios, median(speeds)
    finally:
        state.stream.close()


def _seconds(site: Site, work: Callable[[int], object], steps: int) -> float:
    site.synchronize()
    began = time.monotonic()
    work(steps)
    site.synchronize()
    return time.monotonic() - began


class warnings_of_compile(logging.Handler):
    """What the inner loop says while it is compiled: without a compiler it goes on, and this must not pass as fast."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger(LOGGER).addHandler(self)
        return self._said

    def __exit__(self, *error: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self)
