"""The options of a simulation in addition to the run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from peer.config.methods import DiLoCoConfig, NoLoCoConfig
from peer.config.schema import Config, RunConfig
from peer.errors import UserError

MAX_REPLICAS = 64
USUAL_SWAP = 8  # inner steps


class Method(StrEnum):
    """The methods of the configuration, and controls that only a simulation has."""

    NOLOCO = "noloco"
    DILOCO = "diloco"
    DECOUPLED = "decoupled"
    LOCAL = "local"
    DDP = "ddp"  # gradients averaged in every step: one model, all data
    ONE_WORKER = "one-worker"  # DiLoCo's outer step with a group of one: the effect of momentum alone
    AVERAGING = "averaging"  # pairs take the mean of their weights: NoLoCo with α 0, β 1, γ 1


@dataclass(frozen=True)
class Options:
    """``speeds``: inner steps in a unit of simulated time, repeated over the replicas."""

    replicas: int
    method: Method
    drop: float = 0.0  # share of the swaps that fail; in a group, share of the members that miss a round
    swap_steps: int | None = None  # inner steps during an overlapped swap; 8, or half a phase if that is shorter
    speeds: Sequence[float] = (1.0,)
    non_iid: bool = False  # every replica reads its own part of the text
    workers: int = 1  # replicas trained at the same time; one at a time if the model has dropout

    def overlap(self, run: RunConfig) -> int:
        """Inner steps during a swap of ``run``; 0 when it is waited for."""
        return (self.swap_steps or max(1, min(USUAL_SWAP, run.inner_steps // 2))) if run.exchange.overlap else 0

    def check(self, config: Config) -> None:
        ddp = self.method is Method.DDP
        if not 2 <= self.replicas <= MAX_REPLICAS:
            raise UserError(f"--replicas {self.replicas}: a simulation needs 2 to {MAX_REPLICAS}")
        if not 0 <= self.drop <= 1:
            raise UserError(f"--drop {self.drop:g}: it is a share, 0 to 1")
        for name, value in (("--workers", self.workers), ("--swap-steps", self.swap_steps)):
            if value is not None and value < 1:
                raise UserError(f"{name} {value}: at least 1")
        swap, inner_steps = self.overlap(config.run), config.run.inner_steps
        if swap >= inner_steps:
            raise UserError(f"--swap-steps {swap}: below run.inner_steps ({inner_steps}); --network has longer swaps")
        if any(not 0.01 <= speed <= 100 for speed in self.speeds):
            raise UserError("--speeds: each from 0.01 to 100")
        if ddp and (self.drop or set(self.speeds) != {self.speeds[0]}):
            raise UserError("--method ddp: every step waits for every replica; --drop and --speeds do not fit")


def with_method(config: Config, method: Method | None) -> tuple[Config, Method]:
    """The configuration for ``method``; ``None``: its own method. Its settings of that method stay."""
    outer, exchange = config.run.outer, config.run.exchange
    if method is None or method == outer.name:
        return config, Method(outer.name)
    chosen: Any = {
        Method.DDP: {"name": "local"},
        Method.ONE_WORKER: outer if isinstance(outer, DiLoCoConfig) else {"name": "diloco"},
        Method.AVERAGING: {"name": "noloco", "alpha": 0.0, "beta": 1.0, "gamma": 1.0},
    }.get(method, {"name": method.value})
    if not (isinstance(outer, NoLoCoConfig) and method is Method.AVERAGING):  # overlap and codec are noloco's
        exchange = exchange.model_validate(exchange.model_dump(exclude={"overlap", "codec"}))
    run = RunConfig(**{**dict(config.run), "outer": chosen, "exchange": exchange})
    return config.model_copy(update={"run": run}), method
