"""Random faults for peers in the network laboratory: killed, frozen, disconnected and restarted.

Used by tests/benchmarks/churn.py (two hours, eight peers) and tests/netlab/test_churn.py (a short form).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from peer.swarm.healing import STALE_ROUNDS
from tests.netlab.peers import Child, LabSwarm
from tests.netlab.plan import load
from tests.swarm.support.shadow import check
from tests.whole_tail import WholeTail

HANG = 60.0  # seconds without a round: more than all deadlines of a round, for peers that share two cores
EXIT = 40.0  # seconds to end after SIGTERM
SETS = ("run.steps=100000000", "run.evaluation.every_rounds=100000")
WEIGHED = 12  # least rounds of a process whose memory is checked
GROWTH = 1.3  # allowed growth of a process's memory after its first third


@dataclass
class Member:
    """``away``: until then, or until its next round, it is excused. ``since``: when it made its last round or was
    excused; ``last``: when it made its last round or was started.
    """

    host: int
    name: str
    process: Child
    tail: WholeTail
    rows: int = 0
    since: float = 0.0
    last: float = 0.0
    away: float = 0.0
    memory: list[int] = field(default_factory=list)  # samples of resident bytes
    stopped: bool = False  # until it is restarted: its last round must not end its excuse
    left: Left | None = None  # from its restart until its next round


@dataclass(frozen=True)
class Left:
    """The state at a restart: the peer's ``rows`` and ``last`` round, and the round that all ``others`` had made."""

    rows: int
    last: int
    others: int

    @property
    def may_lose(self) -> int:
        """Rounds that it may repeat: it downloads no state for so few, and the others may have no newer state."""
        return max(STALE_ROUNDS, self.last - self.others)


class Soak:
    """Makes faults for ``seconds``, one every ``pause`` seconds on average."""

    def __init__(
        self, swarm: LabSwarm, peers: int, seconds: float, pause: float, seed: int, sets: Sequence[str]
    ) -> None:
        self._swarm, self._seconds, self._pause, self._sets = swarm, seconds, pause, sets
        self._chance = random.Random(seed)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.faults: Counter[str] = Counter()
        self.hangs: list[str] = []
        self.longest = self.longest_in_all = 0.0  # seconds without a round: while not excused, and with that time
        self.frozen = self.cut_off = 0.0  # seconds, of all peers
        self.growth = 1.0
        self.set_back: list[int] = []  # rounds that a peer repeated after a restart
        self.too_far: list[str] = []  # repetitions of more rounds than necessary
        names = {host: f"peer-{host}" for host in range(1, peers + 1)}
        self.members = [
            Member(host, name, self._start(host, name), WholeTail(name, swarm.folder / name))
            for host, name in names.items()
        ]

    def run(self) -> None:
        """Make faults until the time is up, then ask all to end."""
        for member in self.members:
            self._swarm.wait_for(lambda member=member: bool(member.tail.poll() or member.tail.rounds))  # type: ignore[misc]
            member.since = member.last = time.monotonic()
        until, strike = time.monotonic() + self._seconds, 0.0
        while (now := time.monotonic()) < until or self._later:
            if strike < now < until:
                strike = now + self._chance.expovariate(1 / self._pause)
                self._strike()
            due = [it for it in self._later if it[0] <= now]
            self._later = [it for it in self._later if it[0] > now]
            for _, work in due:
                work()
            self._look()
            time.sleep(0.2)
        self._end()

    # -- faults

    def _strike(self) -> None:
        now = time.monotonic()
        able = [it for it in self.members if it.process.poll() is None and it.away < now and not it.stopped]
        if len(able) <= len(self.members) // 2:
            return
        kinds = (self._kill, self._leave, self._freeze, self._cut, self._lose_bootstrap)
        (kind,) = self._chance.choices(kinds, weights=(3, 2, 3, 3, 1))
        self.faults[kind.__name__.strip("_")] += 1
        kind(self._chance.choice(able))

    def _kill(self, member: Member) -> None:
        self._stop(member, signal.SIGKILL)

    def _leave(self, member: Member) -> None:
        self._stop(member, signal.SIGTERM)

    def _stop(self, member: Member, number: int) -> None:
        member.away, member.stopped = time.monotonic() + EXIT, True
        member.process.send_signal(number)
        self._in(self._chance.uniform(1, 5), lambda: self._again(member, time.monotonic() + EXIT))

    def _again(self, member: Member, deadline: float) -> None:
        """Restart it when it has ended."""
        if member.process.poll() is None:
            if time.monotonic() < deadline:
                self._in(0.5, lambda: self._again(member, deadline))
                return
            self.hangs.append(f"{member.name} did not end within {EXIT:.0f} s: {self._last_words(member)}")
            member.process.kill()
            member.process.wait(10)
        member.tail.poll()
        rows = member.tail.rounds
        member.left = Left(len(rows), rows[-1]["round"], self._others(member)) if rows else None
        member.process, member.stopped = self._start(member.host, member.name), False
        member.memory.clear()
        member.last = time.monotonic()
        member.away = time.monotonic() + 60  # it loads its libraries while all others train

    def _freeze(self, member: Member) -> None:
        seconds = self._chance.uniform(2, 15)
        member.away = time.monotonic() + seconds + 1
        self.frozen += seconds
        member.process.send_signal(signal.SIGSTOP)
        process = member.process

        def thaw() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

        self._in(seconds, thaw)

    def _cut(self, member: Member) -> None:
        seconds = self._chance.uniform(3, 15)
        member.away = time.monotonic() + seconds + 1
        self.cut_off += seconds
        self._swarm.lab.cut(member.host)
        self._in(seconds, self._swarm.lab.cut)

    def _lose_bootstrap(self, member: Member) -> None:
        self._swarm.bootstrap.kill()
        self._swarm.bootstrap.wait(10)
        self._in(self._chance.uniform(2, 15), self._swarm.start_bootstrap)

    def _in(self, seconds: float, work: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, work))

    # -- observations

    def _start(self, host: int, name: str) -> Child:
        (self._swarm.folder / "shadow" / name).mkdir(parents=True, exist_ok=True)
        return self._swarm.peer(
            host,
            name,
            "configs/demo.yaml",
            (*SETS, *self._sets),
            module="tests.swarm.programs.shadowed_peer",
            environment={"SHADOW": str(self._swarm.folder / "shadow" / name)},
        )

    def _look(self) -> None:
        now = time.monotonic()
        for member in self.members:
            member.tail.poll()
            self._compare(member)
            count = len(member.tail.rounds)
            if member.process.poll() is None and not member.stopped:
                self.longest_in_all = max(self.longest_in_all, now - member.last)
            if count != member.rows:
                self._weigh(member)
                member.last = now
                member.away = min(member.away, now)
            if count != member.rows or member.away > now or member.process.poll() is not None:
                member.rows, member.since = count, now
            stalled = now - member.since
            self.longest = max(self.longest, stalled)
            if stalled > HANG:
                self.hangs.append(f"{member.name} has made no round for {stalled:.0f} s: {self._last_words(member)}")
                member.since = now

    def _compare(self, member: Member) -> None:
        """How many rounds does it repeat? It removes the rows of repeated rounds from its file."""
        if member.left is None:
            return
        left, found = member.left, member.tail.rounds
        if len(found) < left.rows:
            member.left = replace(left, rows=len(found))
        elif len(found) > left.rows:
            again = max(0, left.last + 1 - found[left.rows]["round"])
            self.set_back.append(again)
            if again > left.may_lose:
                self.too_far.append(f"{member.name} repeated {again} rounds: {left}")
            member.left = None

    def _others(self, member: Member) -> int:
        """The last round that all other peers without a current fault have made."""
        now = time.monotonic()
        able = [it for it in self.members if it is not member and it.process.poll() is None and it.away < now]
        return min((it.tail.rounds[-1]["round"] for it in able if it.tail.rounds), default=0)

    def _weigh(self, member: Member) -> None:
        with suppress(psutil.NoSuchProcess):
            member.memory.append(psutil.Process(member.process.pid).memory_info().rss)

    def _end(self) -> None:
        for member in self.members:
            third = member.memory[len(member.memory) // 3 :]
            if len(member.memory) >= WEIGHED:
                self.growth = max(self.growth, third[-1] / third[0])
            member.process.send_signal(signal.SIGTERM)
        for member in self.members:
            try:
                member.process.wait(EXIT)
            except subprocess.TimeoutExpired:
                self.hangs.append(f"{member.name} did not end within {EXIT:.0f} s: {self._last_words(member)}")

    def _last_words(self, member: Member) -> list[str]:
        """The last log lines, to explain a hang."""
        return (self._swarm.folder / f"{member.name}.log").read_text(encoding="utf-8").splitlines()[-3:]

    def running(self) -> list[int]:
        """The process ids of peers that have not ended."""
        return [member.process.pid for member in self.members if member.process.poll() is None]

    def losses(self) -> tuple[float, float]:
        """The loss of the first steps and of the last rounds, means over the peers."""
        trained = [member.tail.trained for member in self.members]
        first = mean(rows[0]["first_train_loss"] for rows in trained)
        return first, mean(mean(row["train_loss"] for row in rows[-5:]) for rows in trained)


def soak(
    folder: Path, *, peers: int, seconds: float, pause: float, seed: int, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """The figures of ``churn.json``. ``sets``: settings other than the demo's."""
    with LabSwarm(load("lan"), peers, folder, warm=True) as swarm:
        run = Soak(swarm, peers, seconds, pause, seed, sets)
        run.run()
    left = _left(folder) + run.running()
    found = check(folder / "shadow", [f"peer-{host}" for host in range(1, peers + 1)])
    first, last = run.losses()
    rows = [row for member in run.members for row in member.tail.rounds]
    outcomes = Counter(row["outcome"] for row in rows)
    return {
        "faults": sum(run.faults.values()),
        "kinds": dict(run.faults),
        "hangs": len(run.hangs),
        "which": run.hangs,
        "rounds": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "reasons": dict(Counter(row["reason"] for row in rows if row["reason"])),
        "merged_share": outcomes["merged"] / sum(outcomes.values()),
        "parts": found.parts,
        "wrong_parts": found.wrong,
        "unresolved_share": found.left,
        "processes_left": len(left),
        "memory_growth": run.growth,
        "restarts": len(run.set_back),
        "rounds_lost": max(run.set_back, default=0),
        "lost_too_many": run.too_far,
        "first_loss": first,
        "last_loss": last,
        "frozen_s": run.frozen,
        "cut_s": run.cut_off,
        "longest_stall_s": run.longest,
        "longest_stall_with_faults_s": run.longest_in_all,
    }


def _left(folder: Path) -> list[int]:
    """Ids of processes that name ``folder``, after the daemons had some time to notice that their peers have ended."""
    until = time.monotonic() + EXIT
    while (found := [it.pid for it in psutil.process_iter() if _mentions(it, folder)]) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _mentions(process: psutil.Process, folder: Path) -> bool:
    """Does its command line name ``folder``? Those of peers and their daemons do."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.pid != os.getpid() and any(str(folder) in part for part in process.cmdline())
    return False
