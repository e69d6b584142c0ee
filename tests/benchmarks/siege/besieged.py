"""The swarm that is attacked, and what is measured of it."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path
from typing import Any, Self

import psutil

from dht_bootstrap import owner
from tests.benchmarks.siege.attacks import ATTACKS, Attack, Swarm
from tests.benchmarks.siege.figures import Memory, met, monitor_answers, watched
from tests.swarm.support import harness
from tests.swarm.support.harness import Process, wait_for

PEERS = 6
LAST = f"peer{PEERS - 1}"  # leaves its place to a hostile member
WARM_ROUNDS = 6
SETTLE = 2.0  # seconds after an attack
JOIN = 45.0  # seconds after which a newcomer is given up
RUN = (
    *("run.inner_steps=100", "run.steps=1000000", "run.inner.learning_rate=3e-4"),
    *("run.exchange.overlap=false", "run.exchange.codec=none", "peer.checkpoint.every_rounds=4"),
)
GROUP = ("run.outer={name: diloco, momentum: 0.5}", "run.exchange.stall=3")
TOGETHER = (f"peer.start_with={PEERS}", "peer.start_patience=120")


class Besieged:
    """A bootstrap node and honest peers, until the end of the context. ``group``: of everyone (DiLoCo)."""

    def __init__(self, folder: Path, kind: Swarm, *, group: bool) -> None:
        self.swarm, self._folder, self._kind = harness.Swarm(folder), folder, kind
        self._sets = (*RUN, *(GROUP if group else ()))
        self._number = 0
        self.nodes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        owned: tuple[str, ...] = ()
        if self._kind == "invited":
            owned = ("--owner", str(self._owner))
            self._invite("revoked")
            owner.revoke(self._owner, "revoked")
        try:
            self.nodes["bootstrap"], self._address = self.swarm.bootstrap(*owned)
            names = [f"peer{number}" for number in range(PEERS)]
            self.nodes |= {name: self._peer(name, *TOGETHER) for name in names}
            for name in names:
                self.swarm.wait_for_rounds(name, WARM_ROUNDS, 120)
        except BaseException:
            self.swarm.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.swarm.end()

    def attack(self, name: str, seconds: float) -> dict[str, Any]:
        """The figures of ``seconds`` before it and during it. A newcomer joins and leaves before these begin."""
        attack = ATTACKS[name]
        self._number += 1
        judged = [it for it in self.nodes if it not in ("bootstrap", LAST)] if attack.trains else [*self.nodes][1:]
        if attack.trains:
            _end(self.nodes.pop(LAST))
        with watched(self.swarm, judged) as before:
            time.sleep(seconds)
        memory, attacker = Memory(self.nodes.values()), self._attacker(name, attack)
        joined = self._newcomer()
        with watched(self.swarm, judged) as during:
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(1.0, left))
                memory.look()
        loss = during.pop("loss"), before.pop("loss")
        died = sum(process.popen.poll() is not None for process in self.nodes.values())
        row = {
            "swarm": self._kind,
            "threat": attack.threat,
            **{f"{key}_before": value for key, value in before.items()},
            **{f"{key}_during": value for key, value in during.items()},
            "rss_growth_mib": memory.growth,
            "died": died,
            "loss_ratio": _ratio(*loss),
            "joined_seconds": joined,
            "monitor": monitor_answers(self.nodes["bootstrap"]),
            "forged_lines": sum("\x1b" in process.output() for process in self.nodes.values()),
        }
        if attacker is not None:
            assert attacker.popen.poll() is None, f"the attacker has ended:\n{attacker.output()}"
            said = re.findall(r"tried (\d+), taken (\d+)", attacker.output())
            row |= {"tried": int(said[-1][0]), "taken": int(said[-1][1])} if said else {}
            row |= {"met": met(self.swarm, judged, f"hostile{self._number}")} if attack.trains else {}
            _end(attacker, signal.SIGTERM if attack.trains else signal.SIGKILL)
        if not died and LAST not in self.nodes:
            self.nodes[LAST] = self._peer(LAST)
            self.swarm.wait_for_rounds(LAST, len(self.swarm.rounds(LAST)) + 1, 60)
        time.sleep(SETTLE)
        return row

    # -- processes

    @property
    def _owner(self) -> Path:
        return self._folder / "owner.key"

    def _invite(self, name: str) -> str:
        """The file with a new invitation."""
        file = self._folder / f"{name}.invitation"
        if not file.exists():
            said = owner.invite(self._owner, name, 1, file)
            public = re.search(r"run\.owner=(\S+)", said)
            assert public is not None
            self._admission = ("run.admission=invite", f"run.owner={public[1]}")
        return str(file)

    def _arguments(self, name: str, *sets: str) -> list[str]:
        invited = (*self._admission, f"peer.invitation={self._invite(name)}") if self._kind == "invited" else ()
        return self.swarm.train(name, *self._sets, *sets, *invited, address=self._address)

    def _peer(self, name: str, *sets: str) -> Process:
        return self.swarm.start(name, self._arguments(name, *sets))

    def _attacker(self, name: str, attack: Attack) -> Process | None:
        called = f"hostile{self._number}"
        if attack.program == "none":
            return None
        if attack.program == "member":
            arguments = self._arguments(called)
            arguments[1] = "tests.benchmarks.siege.member"
        else:
            invitation = "-"
            if attack.invited and self._kind == "invited":
                invitation = self._invite("revoked" if name == "revoked" else called)
            arguments = ["-m", "tests.benchmarks.siege.outsider", name, str(self._folder / f"{called}.key")]
            targets = self._bulk_ports() if name == "half_open" else [self._address, *self._addresses()]
            arguments += [invitation, *targets]
        process = self.swarm.start(called, arguments, {"ATTACK": name})
        process.line("attacks", 60)
        return process

    def _addresses(self) -> list[str]:
        """Of the peers, as everybody can read them in the directory of an open swarm."""
        found = [
            re.search(r"address=(/ip4/\S+)", it.output()) for name, it in self.nodes.items() if name != "bootstrap"
        ]
        return [it[1] for it in found if it is not None]

    def _bulk_ports(self) -> list[str]:
        """Where the peers listen besides their metrics; their p2p daemons are other processes."""
        found = []
        for process in (it for name, it in self.nodes.items() if name != "bootstrap"):
            metrics = re.search(r"metrics=\S+:(\d+)", process.output())
            listening = (it for it in psutil.Process(process.pid).net_connections("tcp") if it.status == "LISTEN")
            found += [str(it.laddr.port) for it in listening if metrics and str(it.laddr.port) != metrics[1]]
        return found

    def _newcomer(self) -> float | None:
        """Seconds until a newcomer had the weights of a member; ``None``: it had none when it was given up."""
        name, began = f"newcomer{self._number}", time.monotonic()
        process = self._peer(name)
        joined = None
        while joined is None and time.monotonic() < began + JOIN and process.popen.poll() is None:
            if "took the state of a member" in process.output():
                joined = round(time.monotonic() - began, 1)
            time.sleep(0.1)
        _end(process)
        return joined


def _ratio(during: float, before: float) -> float | None:
    return round(during / before, 3) if during == during else None


def _end(process: Process, number: int = signal.SIGTERM) -> None:
    """Ask it to leave, and end it with its children, by id, when it does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        process.signal(number)
        _, left = psutil.wait_procs(family, timeout=5)
        for member in left:
            if harness.running(member):
                member.kill()
    wait_for(lambda: process.popen.poll() is not None, 10, process.output)
