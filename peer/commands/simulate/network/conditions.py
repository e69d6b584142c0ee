"""The conditions of a modelled swarm, and the figures of a method."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from peer.config.schema import RunConfig
from peer.errors import UserError
from peer.exchange.codec import size

MAX_PEERS = 10_000
Times = NDArray[np.float64]


@dataclass(frozen=True)
class Conditions:
    """All times in seconds, all sizes in bytes. Log-normal: median times exp(sigma * standard normal)."""

    peers: int
    rounds: int
    inner_steps: int  # H
    payload: int  # of one contribution in fp32
    step_seconds: float  # median
    step_sigma: float = 0.2
    speeds: Sequence[float] = (1.0,)  # repeated over the peers
    latency: float = 0.03  # one way, median
    latency_sigma: float = 0.3
    up: float = 1.25e6  # bytes a second
    down: float = 6.25e6
    loss: float = 0.0  # share of the swaps, or of a group's members, that break off
    churn: float = 0.0  # share of the peers that newcomers replace in a round
    stall: float = 10.0  # seconds without a byte until a swap ends
    max_phases: float = 4.0  # inner phases that a swap may take
    overlap: bool = False  # of noloco's swaps
    coded: float = 1.0  # share of the payload that the codec sends, of noloco and diloco
    window: float = 0.5

    def check(self) -> None:
        if not 2 <= self.peers <= MAX_PEERS:
            raise UserError(f"--replicas {self.peers}: the network model takes 2 to {MAX_PEERS:,}")
        if self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: at least 1")
        for name, value in (("--step-seconds", self.step_seconds), ("--up-mbit", self.up), ("--down-mbit", self.down)):
            if not 0 < value < float("inf"):
                raise UserError(f"{name}: must be above 0")
        for name, value in (("--loss", self.loss), ("--churn", self.churn)):
            if not 0 <= value < 1:
                raise UserError(f"{name} {value:g}: it is a share, from 0 to below 1")
        if not all(0 <= value < float("inf") for value in (self.step_sigma, self.latency, self.latency_sigma)):
            raise UserError("--step-sigma, --latency-ms and --latency-sigma: not below 0, and finite")
        if not all(0.01 <= speed <= 100 for speed in self.speeds):
            raise UserError("--speeds: each from 0.01 to 100")


def conditions(run: RunConfig, numel: int, args: argparse.Namespace) -> Conditions:
    """The conditions that the options and the run's configuration describe. Raises :class:`UserError`."""
    whole, coded = size("none", numel), size(run.exchange.codec, numel)
    found = Conditions(
        **{it.name: getattr(args, it.name) for it in fields(Conditions) if it.name in args},
        peers=args.replicas,
        inner_steps=run.inner_steps,
        payload=whole,
        latency=args.latency_ms / 1000,
        up=args.up_mbit * 125_000,
        down=args.down_mbit * 125_000,
        stall=run.exchange.stall,
        max_phases=run.exchange.max_phases,
        overlap=run.exchange.overlap,
        coded=coded / whole,
        window=run.rendezvous.window,
    )
    found.check()
    return found


@dataclass(frozen=True)
class Figures:
    """Means over peers and rounds. ``seconds`` and ``idle_share``: until the last peer has made all its rounds;
    ``end_seconds``: of a peer after its last inner step; ``idle_in_all``: with these.
    """

    method: str
    seconds: float
    idle_share: float
    merged_share: float  # of the rounds
    bytes_per_round: float  # sent by a peer
    idle_in_all: float
    end_seconds: float = 0.0


class Chance:
    """Random times under ``conditions``."""

    def __init__(self, conditions: Conditions, seed: int) -> None:
        self._it = conditions
        self.rng = np.random.default_rng(seed)
        self.speed = np.resize(np.array(conditions.speeds), conditions.peers)

    def all_phase_seconds(self) -> Times:
        """Seconds of one inner phase of every peer."""
        shape = (self._it.peers, self._it.inner_steps)
        steps = self._it.step_seconds * self.rng.lognormal(0.0, self._it.step_sigma, shape)
        return np.asarray(steps.sum(1) / self.speed)

    def phase_seconds(self, peer: int) -> float:
        """Of one inner phase of one peer."""
        steps = self._it.step_seconds * self.rng.lognormal(0.0, self._it.step_sigma, self._it.inner_steps)
        return float(steps.sum() / self.speed[peer])

    def latency(self, count: int = 1) -> float:
        """Seconds of the slowest of ``count`` messages that are sent at once."""
        return float(self._it.latency * self.rng.lognormal(0.0, self._it.latency_sigma, count).max())

    def latencies(self, count: int) -> Times:
        """``count`` times the slower of two messages."""
        both = self.rng.lognormal(0.0, self._it.latency_sigma, (2, count))
        return np.asarray(self._it.latency * both.max(0))
