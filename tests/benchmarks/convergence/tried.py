"""Ideas that were tried once each, at equal bytes: another H early and late, quarters of the tensors, other partners,
and weights averaged over time.

python -m tests.benchmarks.convergence.tried [--json FILE]

NoLoCo with 8 replicas, int4, H 8 and AdamW, at a quarter of the tokens (5.4 a parameter), seed 0; of the one that helps
also a second seed, H 16 and Muon. Runs in FILE are not repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peer.commands.simulate import exchanges, world
from peer.commands.simulate.exchanges import OverlappedSwap
from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.replica import Replica
from peer.commands.simulate.simulation import Simulation
from peer.config.schema import Config
from peer.data.open import validation
from peer.exchange.pair.mailbox import overlapped_parts
from tests.benchmarks.common import Known, command_line, finish, parse
from tests.benchmarks.convergence.cases import Case
from tests.benchmarks.convergence.frontier import case, noloco
from tests.swarm.support.attacks import Unguarded

STEPS, H, QUARTERS = 325, 8, 4
WHOLES, PARTS = "overlapped", "overlapped quarters"
LATE = 0.8  # of the steps, from which on weights are averaged over time
NEIGHBOURS = (1, 2, 4)  # i XOR each of them in turn: without training all would be equal after three rounds
# by name: H in the first and in the second half of the steps
HALVES = {"shrinking": (12, 6), "growing": (6, 12)}
AGAIN = tuple(f"{it}, {other}" for other in ("seed 1", "H 16", "Muon") for it in (WHOLES, PARTS))
VARIANTS = ("as it is", *HALVES, "i XOR 1, 2, 4", WHOLES, PARTS, f"{WHOLES}, no guard", *AGAIN)
NOW = threading.local()  # the quarter that a worker swaps; ``None``: all


class Halves(Replica):
    """H changes in the middle of the run."""

    halves = (H, H)

    @property
    def phase_steps(self) -> int:
        self.inner_steps = self.halves[2 * self.state.inner.step >= self.steps]
        return super().phase_steps


class Quarter(OverlappedSwap):
    """Every fourth part, others at the next boundary; all of them after the last step."""

    def run(self) -> None:
        NOW.quarter = None if self.one.done else self.one.state.counters.round % QUARTERS
        super().run()
        NOW.quarter = None


def parts_of_quarter(numel: int) -> list[tuple[int, int]]:
    quarter = getattr(NOW, "quarter", None)
    return overlapped_parts(numel) if quarter is None else overlapped_parts(numel)[quarter::QUARTERS]


def hypercube(arrivals: Any, here: Sequence[Replica], *_: Any) -> list[tuple[Replica, Replica | None]]:
    """All replicas come to their boundaries at the same time."""
    distance = NEIGHBOURS[here[0].state.counters.round % len(NEIGHBOURS)]
    by_number = sorted(here, key=lambda it: it.name)
    return [(one, by_number[number ^ distance]) for number, one in enumerate(by_number) if number < number ^ distance]


class Late:
    """The mean of the slow weights of all replicas at their late boundaries."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas, self.count = replicas, 0
        self.sum = torch.zeros(replicas[0].state.outer.slow.numel, dtype=torch.float64)
        for replica in replicas:
            cross = replica.state.cross_boundary
            replica.state.cross_boundary = partial(self._crossed, replica, cross)  # type: ignore[method-assign]

    def _crossed(self, replica: Replica, cross: Callable[..., None], *given: Any) -> None:
        if replica.state.inner.step >= LATE * replica.steps and not replica.done:
            self.sum += replica.state.outer.slow.phi
            self.count += 1
        cross(*given)

    def loss(self, batches: Sequence[Tensor]) -> float:
        state = self._replicas[0].state
        with state.trying((self.sum / self.count).float()):
            return state.inner.evaluate(batches)


def settings(variant: str) -> Case:
    h = 2 * H if "H 16" in variant else H
    optimizer, alpha = ("muon", 0.1) if "Muon" in variant else ("adamw", 0.2)
    overlap, seed = int(WHOLES in variant), int("seed 1" in variant)
    whole = case("noloco", optimizer, h, noloco(alpha), steps=STEPS, overlap=overlap, seed=seed)
    return replace(whole, h=h // QUARTERS) if PARTS in variant else whole


class Changed(Simulation):
    def __init__(self, config: Config, options: Options, variant: str) -> None:
        super().__init__(config, options)
        self._variant = variant
        self.late: Late | None = None

    def _replicas(self) -> list[Replica]:
        replicas = super()._replicas()
        for replica in replicas:
            if self._variant in HALVES:
                replica.__class__ = type("Halved", (Halves,), {"halves": HALVES[self._variant]})
            if PARTS in self._variant or "no guard" in self._variant:
                replica.guard = Unguarded()  # it judges whole contributions
        self.late = Late(replicas)
        return replicas


def run_one(variant: str) -> dict[str, Any]:
    """One simulation, in a process of its own."""
    if PARTS in variant:
        exchanges.overlapped_parts = parts_of_quarter  # type: ignore[attr-defined]
        world.OverlappedSwap = Quarter  # type: ignore[attr-defined]
    if "XOR" in variant:
        world.choose_pairs = hypercube  # type: ignore[attr-defined]
    it = settings(variant)
    config = it.config()
    options = Options(replicas=it.replicas, method=Method.NOLOCO, swap_steps=max(1, it.overlap))
    simulation = Changed(config, options, variant)
    swarm = simulation.run(lambda line: None)["swarm"]
    batches = validation(config.run, simulation._text.validation)
    assert simulation.late is not None
    kept = ("val_loss_mean", "val_loss_averaged_model", "spread")
    return {
        **{key: swarm[key] for key in kept},
        "late_mean_loss": simulation.late.loss(batches),
        "bytes_per_peer": swarm["bytes_sent"] // it.replicas,
    }


def main() -> None:
    parser = command_line("ideas that were tried once each")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="runs at the same time")
    args = parse(parser)
    known = Known("convergence.tried", args)
    known.run_all(run_one, {it: it for it in VARIANTS}, args.at_once)
    rows = {it: known.get(it, dict) for it in VARIANTS}
    words = ", ".join(f"{it} {row['val_loss_mean']:.4f}" for it, row in rows.items())
    finish("convergence.tried", {"rows": rows}, f"validation loss at equal bytes: {words}", args)


if __name__ == "__main__":
    main()
