"""What a seed decides: the swarm, its machines and lines, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["blocking", "overlapped", "group"]
FAULTS = ("crash", "freeze", "cut", "split", "drop", "leave", "bootstrap", "slow")
CALM = 60.0  # seconds without a fault at the end, in which all wounds must heal


@dataclass(frozen=True)
class Machine:
    """``latency``: to the middle of the network, in seconds, as ``skew`` and ``starts``; lines: bytes a second."""

    step_seconds: float
    latency: float
    up: float
    down: float
    skew: float
    starts: float


@dataclass(frozen=True)
class Fault:
    """``peers``: by number; ``seconds``: how long it lasts."""

    at: float
    kind: str
    peers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """One simulation. ``seconds``: of virtual time until all are asked to stop."""

    seed: int
    kind: Kind
    machines: tuple[Machine, ...]
    faults: tuple[Fault, ...]
    seconds: float
    inner_steps: int
    numel: int
    codec: str


def scenario(seed: int, peers: int | None = None, kind: Kind | None = None) -> Scenario:
    """The scenario of ``seed``; ``peers`` and ``kind`` fix what it would draw."""
    chance = random.Random(seed)
    kinds: tuple[Kind, ...] = ("blocking", "overlapped", "group")
    drawn = chance.choices(kinds, (4, 4, 2))[0]
    kind = kind or drawn
    count = round(4 * 16 ** (chance.random() ** 3))
    count = peers or (min(count, 16) if kind == "group" else count)
    step = chance.choice((0.1, 0.3, 1.0))
    slowest = chance.choice((1.0, 1.0, 1.5, 3.0))
    latency = chance.choice((0.0005, 0.01, 0.05))
    line = chance.choice((1e5, 1e6, 1e8))
    machines = tuple(
        Machine(
            step_seconds=step * chance.uniform(1.0, slowest),
            latency=latency * chance.uniform(0.5, 2.0),
            up=line * chance.uniform(0.5, 2.0),
            down=line * chance.uniform(1.0, 4.0),
            skew=chance.choice((0.0, chance.uniform(-2.0, 2.0))),
            starts=0.0 if number < 2 else chance.choice((chance.uniform(0, 5), chance.uniform(0, 120))),
        )
        for number in range(count)
    )
    inner_steps = chance.choice((5, 10, 20))
    phase = step * inner_steps
    seconds = min(900.0, max(180.0, 25 * phase)) + CALM
    return Scenario(
        seed=seed,
        kind=kind,
        machines=machines,
        faults=_faults(chance, count, seconds - CALM),
        seconds=seconds,
        inner_steps=inner_steps,
        numel=chance.choice((300, 2000)),
        codec="none" if kind == "group" else chance.choice(("none", "none", "fp16", "int8", "int4")),
    )


def _faults(chance: random.Random, count: int, seconds: float) -> tuple[Fault, ...]:
    faults = []
    for _ in range(chance.choice((0, 2, 5, 12))):
        kind = chance.choice(FAULTS)
        size = chance.randint(1, count - 1) if kind == "split" else 1
        if kind == "drop":
            size = 2
        lasts = chance.choice((chance.uniform(0.5, 5), chance.uniform(5, 90)))
        at = chance.uniform(5, seconds)
        peers = tuple(sorted(chance.sample(range(count), min(size, count))))
        faults.append(Fault(at, kind, peers, min(lasts, seconds - at)))
    return tuple(sorted(faults, key=lambda fault: fault.at))
