"""A peer against a bare PyTorch loop: tokens/s, whole and of its inner loop alone; host memory of its outer step.

python -m tests.benchmarks.inner_loop [--quick] [--json FILE]

A whole peer: whole_peer.py. Its inner loop: a bare loop and a peer's InnerLoop alternate in blocks of steps, on the
same model and text in one process. The peer's node is up and connected to a second one. Memory: growth of the peak
resident size in two outer steps with a real swap with a second process, in copies of the model.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import nn

from peer import logs
from peer.config.schema import Config, LlamaModel
from peer.data import corpus
from peer.data.batches import TokenStream
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.p2p.node import Node
from peer.process import LoopContext
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from peer.rounds.types import Outcome
from tests.benchmarks.bare_loop import BareLoop
from tests.benchmarks.common import finish, options
from tests.benchmarks.inner_loop.whole_peer import whole_peer
from tests.benchmarks.swap_partner import Pairing, peer_node

CONFIG = Config()
RUN = CONFIG.run
LENGTH = RUN.data.sequence_length
BIG = LlamaModel(hidden_size=768, intermediate_size=2048, layers=12, heads=12)  # 85M parameters for the memory


def inner_loop(network: nn.Module) -> InnerLoop:
    """The peer's inner loop, on the CPU."""
    return InnerLoop(network, CONFIG, device=torch.device("cpu"), context=LoopContext())


def speed(pairs: int, steps: int, folder: Path) -> float:
    """Median over ``pairs`` of the peer's tokens/s divided by the bare loop's in the same pair of blocks."""
    text = corpus.load(RUN.data).train
    stream = TokenStream(text, batch_size=RUN.batch_size, sequence_length=LENGTH, seed=0, stream=1)
    networks = [model.build(RUN) for _ in range(2)]
    inner, by_hand = (inner_loop(network) for network in networks)
    bare = BareLoop(networks[1], by_hand.optimizer, CONFIG, torch.from_numpy(text))  # the same groups of parameters
    ratios = []
    with peer_node(folder / "a.key") as first, peer_node(folder / "b.key", first.addresses):
        for pair in range(-1, pairs):  # the first one warms up
            seconds = {}
            for kind in ("peer", "bare") if pair % 2 else ("bare", "peer"):
                began = time.monotonic()
                if kind == "peer":
                    inner.run(stream.take(steps))
                else:
                    bare.run(bare.batches(steps))
                seconds[kind] = time.monotonic() - began
            if pair >= 0:
                ratios.append(seconds["bare"] / seconds["peer"])
    print(f"ratios of {pairs} pairs: lowest {min(ratios):.3f}, median {median(ratios):.4f}, highest {max(ratios):.3f}")
    return median(ratios)


def copies(folder: Path) -> tuple[float, int]:
    """Peak host memory of an outer step with a real swap, in fp32 copies of the model, and the parameter count.

    The slope between a small and a large model. So constant memory does not count: code that is loaded at first use,
    the 1 MiB parts in flight.
    """
    figures = []
    for settings in (RUN.model, RUN.model, BIG):  # the first one loads the code
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be reused, uncounted
        with peer_node(folder / "c.key") as node:
            figures.append(outer_step(node, settings))
    _, (small, few), (large, many) = figures
    return round((large - small) / (4 * (many - few)), 2), many


def outer_step(node: Node, settings: LlamaModel) -> tuple[float, int]:
    """Bytes by which two rounds of contribution, swap and apply raise the peak, and the parameter count."""
    network = model.build(RUN.model_copy(update={"model": settings}))
    numel = model.parameter_count(network)
    pairing = Pairing(node, numel)
    partner = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.swap_partner", node.addresses[0], str(numel)])
    try:
        pairing.wait_for_partner()
        with peak_growth() as growth:
            exchange = pairing.exchange()
            outer = NoLoCo(SlowWeights(network.named_parameters()), RUN.outer)  # type: ignore[arg-type]
            for _ in range(2):
                averaged = exchange.average(outer.contribution(), pairing.next_group())
                assert averaged.outcome is Outcome.MERGED, averaged.detail
                outer.apply(averaged.mean)
        partner.wait(60)
    finally:
        if partner.poll() is None:
            partner.kill()
            partner.wait(10)
    return growth[0], numel


@contextmanager
def peak_growth() -> Iterator[list[float]]:
    """Bytes by which the peak resident size inside the block exceeds the size at its begin."""
    growth = [0.0]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _status("VmRSS")
    yield growth
    growth[0] = _status("VmHWM") - before


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return float(line.split()[1]) * 1024
    raise KeyError(key)


def main() -> None:
    args = options("tokens/s of a peer's inner loop against a bare loop; host memory of the outer step")
    logs.quiet_libraries()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        host_copies, numel = copies(Path(folder))
        ratio = speed(20 if args.quick else 60, 10, Path(folder))
    peers = whole_peer(3, 4) if args.quick else whole_peer(5, 8)
    other, shared = (peers[kind]["training"] for kind in ("other_core", "shared_core"))
    words = (
        f"a whole peer: {other['median']:.1%} of a bare PyTorch loop's tokens/s with its node on another core "
        f"({other['lowest']:.1%} to {other['highest']:.1%}), {shared['median']:.1%} on one core "
        f"({shared['lowest']:.1%} to {shared['highest']:.1%}); inner loop alone: {ratio:.2%}; "
        f"outer step: {host_copies:.2f} fp32 copies of the "
        f"model ({numel / 1e6:.0f}M parameters) on the host at its peak"
    )
    figures = {"tokens_per_s_ratio": ratio, "host_copies": host_copies, "whole_peer": peers}
    goals = {
        "a whole peer at least 98% of a bare loop, with its node on another core": other["median"] >= 0.98,
        "the inner loop alone at least 98%": ratio >= 0.98,
    }
    finish("inner_loop", figures, words, args, goals)
