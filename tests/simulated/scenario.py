"""What a seed decides: the swarm, its machines and lines, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from peer.p2p.budgets import RESERVATIONS
from tests.simulated.harm.bad_relays import RELAY_LIES
from tests.simulated.harm.lies import ACCUSING, NO_ROSTER
from tests.swarm.support.attacks import Attack

Kind = Literal["blocking", "overlapped", "group", "decoupled"]
EVERYONE = ("group", "decoupled")  # kinds whose peers average all together
FAULTS = ("crash", "freeze", "cut", "split", "drop", "leave", "bootstrap", "slow")
RARE = ("damage", "snap", "trickle", "narrow")
SPOILS = (*RARE, "slow")  # what ends the swaps of two peers that meet
LIES = (*Attack, "silent", "no-show", "false donor")
GROUP_LIES = ("false mean",)
INVITED = 0.2  # share of the swarms that have invitations
PAUSED = 0.2  # share of the swarms with peers that are paused for a while
NATS = 0.2  # share of the swarms with peers that nobody can dial
BAD_RELAYS = 0.5  # share of those, in which some that can be dialled are bad relays
OUTSIDER = 0.25  # share of the swarms that an outsider troubles
LIAR = 0.25  # share of the swarms of pairs that have a hostile member
TIMED = 0.1  # share of the swarms of pairs whose inner phases end after a time
CALM = 60.0  # seconds without a fault at the end, in which all wounds must heal
SECONDS, ROUNDS = (90.0, 180.0, 360.0), 110  # without the calm; of all peers together, about
LONG_SECONDS, LONG_ROUNDS = (120.0, 240.0, 600.0), 150
MOST_OF_A_GROUP = 16  # peers
ENDLESS = 10**6  # inner steps


@dataclass(frozen=True)
class Machine:
    """``latency``: to the middle of the network, in seconds, as ``skew`` and ``starts``; lines: bytes a second.

    ``lie``: what its peer does to the others; empty for an honest one. ``nat``: nobody can dial it. ``relay``: what it
    does to those that it should relay to (harm/bad_relays.py).
    """

    step_seconds: float
    latency: float
    up: float
    down: float
    skew: float
    starts: float
    lie: str = ""
    nat: bool = False
    relay: str = ""


@dataclass(frozen=True)
class Fault:
    """``peers``: by number; ``seconds``: how long it lasts; ``after``: its process' events from ``at`` to a crash.

    ``stubborn``: who is not invited any more goes on.
    """

    at: float
    kind: str
    peers: tuple[int, ...]
    seconds: float
    after: int
    stubborn: bool = False


@dataclass(frozen=True)
class Scenario:
    """One simulation. ``seconds``: of virtual time until all are asked to stop. ``invited``: it has invitations.
    ``reservations``: of peers behind NATs at one relay. ``inner_time``: ``run.inner_time``."""

    seed: int
    kind: Kind
    machines: tuple[Machine, ...]
    faults: tuple[Fault, ...]
    seconds: float
    inner_steps: int
    numel: int
    codec: str
    invited: bool = False
    steps: int = ENDLESS  # inner steps of the run
    reservations: int = RESERVATIONS
    inner_time: float | None = None

    @cached_property
    def accused(self) -> bool:
        """Does a member of a group say that others failed?"""
        return any(machine.lie in ACCUSING for machine in self.machines)

    @cached_property
    def nats(self) -> bool:
        """Is there a peer that nobody can dial?"""
        return any(machine.nat for machine in self.machines)

    @cached_property
    def calm(self) -> float:
        """The time after the last start and fault."""
        starts = max(machine.starts for machine in self.machines)
        return self.seconds - max(starts, *(fault.at + fault.seconds for fault in self.faults), 0.0)

    def spoilt(self, peer: int, now: float) -> bool:
        """Does a fault of this peer's line end or damage its swaps at this time?"""
        mine = (fault for fault in self.faults if fault.kind in SPOILS and peer in fault.peers)
        return any(fault.at <= now <= fault.at + fault.seconds for fault in mine)

    @cached_property
    def phase_seconds(self) -> float:
        """Seconds of the slowest peer's inner phase."""
        seconds = self.inner_steps * max(machine.step_seconds for machine in self.machines)
        return min(seconds, self.inner_time or seconds)


def scenario(
    seed: int, peers: int | None = None, kind: Kind | None = None, *, long: bool = False, ends: bool = False
) -> Scenario:
    """The scenario of ``seed``; ``peers`` and ``kind`` fix what it would draw. ``long``: half as long again.
    ``ends``: the peers make the last step of their run while faults happen.
    """
    chance = random.Random(seed)
    kinds: tuple[Kind, ...] = ("blocking", "overlapped", "group")
    drawn = chance.choices(kinds, (4, 4, 2))[0]
    kind = kind or drawn
    count = peers or round(4 * 16 ** (chance.random() ** (4 if long else 6)))  # long seeds stay as they were
    if kind in EVERYONE:
        count = min(count, MOST_OF_A_GROUP)
    seconds = chance.choice(LONG_SECONDS if long else SECONDS)
    rounds = LONG_ROUNDS if long else ROUNDS
    phase_seconds = min(max(seconds * count / rounds * chance.uniform(0.5, 2.0), 0.5), 30.0)
    inner_steps = chance.choice((10, 20) if kind == "overlapped" else (5, 10, 20))  # parts of a swap need some steps
    liar = chance.choice(GROUP_LIES if kind in EVERYONE else LIES) if chance.random() < LIAR else ""
    if liar in GROUP_LIES and (kind == "decoupled" or not long):  # drawn from one when seeds were kept
        lies = (*ACCUSING, NO_ROSTER) if kind == "decoupled" else (*GROUP_LIES, *ACCUSING, NO_ROSTER)
        liar = random.Random(f"group lie {seed}").choice(lies)
    machines = _machines(chance, count, phase_seconds / inner_steps, liar)
    reservations = RESERVATIONS
    if not long:
        machines, reservations = behind_nats(seed, machines)
    invited, uninvited = invitations(seed, count, seconds)
    faults = (
        *_faults(chance, count, seconds),
        *rare_faults(seed, count, seconds),
        *uninvited,
        *outsiders(seed, seconds),
        *(() if long else pauses(seed, count, seconds)),  # when long seeds were kept there were none
    )
    return Scenario(
        seed=seed,
        kind=kind,
        machines=machines,
        faults=tuple(sorted(faults, key=lambda it: it.at)),
        seconds=seconds + CALM + 6 * phase_seconds,
        inner_steps=inner_steps,
        numel=chance.choice((300, 2000)),
        codec=_codec(chance, seed, kind, liar, long=long),
        invited=invited,
        steps=round(0.7 * seconds / phase_seconds * inner_steps) if ends else ENDLESS,
        reservations=reservations,
        inner_time=None if long or kind in EVERYONE else inner_time(seed, phase_seconds),
    )


def inner_time(seed: int, phase_seconds: float) -> float | None:
    """After how many seconds an inner phase ends, if after a time: peers of other speeds make other numbers of steps.
    ``phase_seconds``: of the fastest peer, about.
    """
    chance = random.Random(f"inner time {seed}")
    return phase_seconds * chance.uniform(0.6, 1.5) if chance.random() < TIMED else None


def behind_nats(seed: int, machines: tuple[Machine, ...]) -> tuple[tuple[Machine, ...], int]:
    """Which peers nobody can dial, which others are bad relays, and how many reservations a relay has: sometimes few.

    Not more than two join nobody: who keeps its three reservations at such relays does not learn so.
    """
    chance, count = random.Random(f"nat {seed}"), len(machines)
    if chance.random() >= NATS:
        return machines, RESERVATIONS
    order = chance.sample(range(count), count)
    nats, rest = order[: (hidden := chance.randint(1, count - 1))], order[hidden:]
    bad = rest[: chance.randint(0, len(rest))] if chance.random() < BAD_RELAYS else []
    said = [chance.choice(RELAY_LIES) for _ in bad]
    said = [lie if said[:n].count(lie) < 2 else "refuses" for n, lie in enumerate(said)]
    lies = dict(zip(bad, said, strict=True))
    made = (replace(it, nat=n in nats, relay=lies.get(n, "")) for n, it in enumerate(machines))
    return tuple(made), chance.choice((2, 4, RESERVATIONS))


def _codec(chance: random.Random, seed: int, kind: Kind, liar: str, *, long: bool) -> str:
    if kind == "decoupled":
        return "none"
    if kind == "group":  # drawn from nothing, so that the rest of the world stays; groups had none in long ones
        return "none" if long else ("none", "int8", "none", "int4", "none", "int8", "int2", "int4")[seed % 8]
    return "none" if liar else chance.choice(("none", "none", "fp16", "int8", "int4"))


def _machines(chance: random.Random, count: int, step: float, liar: str) -> tuple[Machine, ...]:
    slowest = chance.choice((1.0, 1.0, 1.5, 3.0))
    latency = chance.choice((0.0005, 0.01, 0.05))
    line = chance.choice((1e5, 1e6, 1e8))
    return tuple(
        Machine(
            step_seconds=step * chance.uniform(1.0, slowest),
            latency=latency * chance.uniform(0.5, 2.0),
            up=line * chance.uniform(0.5, 2.0),
            down=line * chance.uniform(1.0, 4.0),
            skew=chance.choice((0.0, chance.uniform(-2.0, 2.0))),
            starts=0.0 if number < 2 else chance.choice((chance.uniform(0, 5), chance.uniform(0, 80))),
            lie=liar if number == count - 1 else "",
        )
        for number in range(count)
    )


def _faults(chance: random.Random, count: int, seconds: float) -> tuple[Fault, ...]:
    faults = []
    for _ in range(chance.choice((0, 2, 5, 12))):
        kind = chance.choice(FAULTS)
        size = chance.randint(1, count - 1) if kind == "split" else 2 if kind == "drop" else 1
        lasts = chance.choice((chance.uniform(0.5, 5), chance.uniform(5, 90)))
        at = chance.uniform(5, seconds)
        peers = tuple(sorted(chance.sample(range(count), size)))
        faults.append(Fault(at, kind, peers, min(lasts, seconds - at), chance.randint(1, 400)))
    return tuple(faults)


def rare_faults(seed: int, count: int, seconds: float) -> list[Fault]:
    """In half of the swarms: faults that must hit the short time of a swap or a download (p2p/network.py)."""
    chance = random.Random(f"rare {seed}")
    faults = []
    for _ in range(chance.choice((0, 0, 2, 6))):
        at = chance.uniform(2, seconds)
        lasts = min(chance.uniform(5, 60), seconds - at)
        faults.append(Fault(at, chance.choice(RARE), (chance.randrange(count),), lasts, 1))
    return faults


def invitations(seed: int, count: int, seconds: float) -> tuple[bool, list[Fault]]:
    """Has the swarm invitations, and whose invitation is revoked or expires; never the first two and the liar's."""
    chance = random.Random(f"invited {seed}")
    if chance.random() >= INVITED:
        return False, []
    peers = chance.sample(range(2, count - 1), min(chance.choice((0, 1, 1, 2)), count - 3))
    kinds = ("revoke", "expire")
    at = chance.uniform
    return True, [Fault(at(5, seconds), chance.choice(kinds), (it,), 0.0, 0, chance.random() < 0.5) for it in peers]


def pauses(seed: int, count: int, seconds: float) -> tuple[Fault, ...]:
    """Which peers are paused, and when."""
    chance = random.Random(f"pause {seed}")
    if chance.random() >= PAUSED:
        return ()
    faults = []
    for number in chance.sample(range(count), chance.randint(1, max(1, count // 2))):
        at = chance.uniform(5, seconds)
        lasts = chance.choice((chance.uniform(0.1, 5), chance.uniform(5, 90)))
        faults.append(Fault(at, "pause", (number,), min(lasts, seconds - at), 0))
    return tuple(faults)


def outsiders(seed: int, seconds: float) -> list[Fault]:
    """When an outsider opens streams (outsiders.py)."""
    chance = random.Random(f"outsider {seed}")
    if chance.random() >= OUTSIDER:
        return []
    at = chance.uniform(0, seconds)
    return [Fault(at, "outsider", (), chance.uniform(0, seconds - at), 0)]
