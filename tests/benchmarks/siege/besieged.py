"""The swarm that is attacked, and what is measured of it."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any, Self

import psutil

from peer.p2p import identity
from tests.benchmarks.siege import outsider
from tests.swarm.support.harness import Process, Swarm, wait_for

PEERS = 6
SWARMS = ("open", "invited")
MEMBERS = ("random", "silent", "no-show", "boast", "false donor")  # what a hostile member does (simulated/harm/lies.py)
ATTACKS = (*outsider.REQUESTS, *outsider.STREAMS, *MEMBERS)
QUICK = ("nested", "ghosts", "silent")
WARM_ROUNDS = 6
SETS = ("run.inner_steps=100", "run.steps=1000000", "run.inner.learning_rate=3e-4", f"peer.start_with={PEERS}")
JOIN = 120.0  # seconds for a newcomer


class Besieged:
    """A bootstrap node and honest peers, until the end of the context."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.swarm, self.folder, self._kind = Swarm(folder), folder, kind
        self._invited: list[str] = []
        self.nodes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.swarm.end()

    def _begin(self) -> None:
        owner = self.folder / "owner.key"
        names = [*(f"peer{number}" for number in range(PEERS)), "newcomer", "hostile"]
        arguments: list[str] = []
        if self._kind == "invited":
            from dht_bootstrap import owner as book

            said = [book.invite(owner, name, 1, self.folder / f"{name}.invitation") for name in names]
            public = re.search(r"run\.owner=(\S+)", said[0])
            assert public is not None
            self._invited = ["run.admission=invite", f"run.owner={public[1]}"]
            arguments = ["--owner", str(owner)]
        self.nodes["bootstrap"], self.address = self.swarm.bootstrap(*arguments)
        for name in names[:PEERS]:
            self.nodes[name] = self.swarm.peer(name, *SETS, *self._sets(name), address=self.address)
        for name in names[:PEERS]:
            self.swarm.wait_for_rounds(name, WARM_ROUNDS, 120)

    def _sets(self, name: str) -> list[str]:
        return [*self._invited, f"peer.invitation={self.folder}/{name}.invitation"] if self._invited else []

    def attack(self, name: str, seconds: float) -> dict[str, Any]:
        """The figures before and during it."""
        before = self._window(seconds)
        start = {node: _memory(process) for node, process in self.nodes.items()}
        attacker = self._attacker(name)
        began, merged = time.monotonic(), len(self.swarm.rounds("peer0"))
        newcomer = self.swarm.peer("newcomer", *SETS[:3], *self._sets("newcomer"), address=self.address)
        joined = self._joined(newcomer, began)
        during = self._window(max(0.0, seconds - (time.monotonic() - began)), merged)
        died = sum(process.popen.poll() is not None for process in self.nodes.values())
        growth = max((_memory(it) - start[node]) / 2**20 for node, it in self.nodes.items())
        attacker.popen.send_signal(9)
        return {
            "swarm": self._kind,
            "merged_before": before[0],
            "merged_during": during[0],
            "rss_growth_mib": round(growth, 1),
            "died": died,
            "loss_ratio": round(during[1] / before[1], 3),
            "joined_seconds": joined,
        }

    def _attacker(self, name: str) -> Process:
        if name in MEMBERS:
            sets = (*SETS[:3], *self._sets("hostile"))
            arguments = self.swarm.train("hostile", *sets, address=self.address)
            arguments[1] = "tests.swarm.programs.hostile_peer"
            hostile = self.swarm.start("hostile", arguments, {"LIE": name})
            wait_for(lambda: len(self.swarm.rounds("hostile")) > 0, 60, hostile.output)
            return hostile
        key = self.folder / "outsider.key"
        identity.load_or_create(key)
        arguments = ["-m", "tests.benchmarks.siege.outsider", name, str(key), self.address, *self._addresses()]
        attacker = self.swarm.start("outsider", arguments)
        attacker.line("attacks", 60)
        return attacker

    def _addresses(self) -> list[str]:
        """Of the peers, as everybody can read them in the directory of an open swarm."""
        found = [re.search(r"address=(/ip4/\S+)", self.nodes[f"peer{number}"].output()) for number in range(PEERS)]
        return [it[1] for it in found if it is not None]

    def _window(self, seconds: float, since: int | None = None) -> tuple[float, float]:
        """Share of merged rounds and mean training loss in the next ``seconds``."""
        first = {f"peer{number}": len(self.swarm.rounds(f"peer{number}")) for number in range(PEERS)}
        if since is not None:
            first = dict.fromkeys(first, since)
        time.sleep(seconds)
        rows = [row for name, start in first.items() for row in self.swarm.rounds(name)[start:]]
        assert rows, "no peer has ended a round"
        share = sum(row["outcome"] == "merged" for row in rows) / len(rows)
        return round(share, 3), mean(row["train_loss"] for row in rows)

    def _joined(self, newcomer: Process, began: float) -> float | None:
        while time.monotonic() < began + JOIN:
            if "took the state of a member" in newcomer.output():
                return round(time.monotonic() - began, 1)
            time.sleep(0.2)
        return None


def _memory(process: Process) -> int:
    """Resident bytes of a process and its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return sum(it.memory_info().rss for it in (root, *root.children(recursive=True)))
    return 0
