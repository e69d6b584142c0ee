"""One simulation from its scenario: starts the peers, lets faults happen, and notes every violation of a promise."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peer import clock
from peer.config.schema import Config
from peer.logs import LOGGER
from peer.p2p.greeting import MemberIdentity
from peer.p2p.reachability import relay
from peer.p2p.settings import NodeSettings
from peer.process import Pause, Stop
from peer.telemetry.run_log import ROUNDS, Row, read_rows
from peer.training import resources
from tests.simulated.checks import conduct, deadlines, promises, relays
from tests.simulated.checks.ledger import Ledger
from tests.simulated.harm.faults import RESTART, Faults
from tests.simulated.loop import PROCESS, Process, Stuck
from tests.simulated.p2p.admission import NEVER, Invitations
from tests.simulated.p2p.circuit import Circuits
from tests.simulated.p2p.dht import SimulatedDHT
from tests.simulated.p2p.network import NOBODY, Host, Network
from tests.simulated.p2p.node import SimulatedNode
from tests.simulated.peer import SimulatedPeer
from tests.simulated.runtime import EPOCH, Runtime
from tests.simulated.scenario import Machine, Scenario

FOLDERS = "/dev/shm" if Path("/dev/shm").is_dir() else None
LAST_LOOK = 20.0  # seconds before the end
STOPPING = 400.0  # virtual seconds for all peers to end after they were asked to


@dataclass
class Report:
    """What a simulation came to."""

    scenario: Scenario
    virtual_seconds: float = 0.0
    steps: int = 0
    merges: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class World:
    """``say`` prints the trace as it grows, if it is given."""

    def __init__(self, scenario: Scenario, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.scenario, self.report, self._print = scenario, Report(scenario), say
        chance = random.Random(f"world {scenario.seed}")
        self.chance, self.runtime = chance, Runtime(chance)
        self.loop = self.runtime.loop
        self.loop.complain = lambda context: self.say("loop", f"{context.get('message')} {context.get('exception')!r}")
        self.network = Network(self.loop, chance)
        Circuits(self.network)
        self.nodes: dict[str, SimulatedDHT] = {}
        self.bootstrap = self.network.add(0.005, 1e9, 1e9)
        self.bootstrap_process, self.bootstrap_node, self.booted = Process("bootstrap"), None, 0.0
        self.invitations = Invitations(scenario.seed) if scenario.invited else None
        self.announcer: Any = None  # the bootstrap node's authority
        self.ledger = Ledger(self.violation, lambda peer, line: self.say(peer.name, line))
        self.peers = [self._peer(number, machine, folder) for number, machine in enumerate(scenario.machines)]
        self.relays = relays.Relays(self)
        self.promises, self.conduct = promises.Promises(self), conduct.Conduct(self)
        self.stopping = False

    # -- notes

    def say(self, who: str, line: str) -> None:
        entry = f"{self.loop.time():9.3f}  {who:10}  {line}"
        self.report.trace.append(entry)
        if self._print is not None:
            self._print(entry)

    def violation(self, what: str) -> None:
        self.report.violations.append(f"at {self.loop.time():.3f} s: {what}")
        self.say("VIOLATION", what)

    # -- the swarm

    def _peer(self, number: int, machine: Machine, folder: Path) -> SimulatedPeer:
        host = self.network.add(machine.latency, machine.up, machine.down, nat=machine.nat)
        path = folder / f"peer{number}"
        path.mkdir()
        return SimulatedPeer(
            name=f"peer{number}",
            host=host,
            config=self._config(),
            folder=path,
            step_seconds=machine.step_seconds,
            numel=self.scenario.numel,
            seed=self.scenario.seed * 1000 + number,
            skew=machine.skew,
            lie=machine.lie,
            bad_relay=machine.relay,
            authority=partial(self._authority, host, number),
        )

    def _authority(self, host: Host, number: int) -> Any:
        if self.invitations is None:
            return None
        ends = [it for it in self.scenario.faults if it.kind in ("revoke", "expire") and number in it.peers]
        expires = next((EPOCH + it.at for it in ends if it.kind == "expire"), NEVER)
        stubborn = any(it.stubborn for it in ends)
        return self.invitations.authority(host.peer_id, expires, stubborn=stubborn)

    def _config(self) -> Config:
        scenario, overlap = self.scenario, self.scenario.kind == "overlapped"
        outer = {"name": {"group": "diloco", "decoupled": "decoupled"}.get(scenario.kind, "noloco")}
        run = {
            "name": "simulated",
            "steps": scenario.steps,
            "inner_steps": scenario.inner_steps,
            "inner_time": scenario.inner_time,
            "outer": outer,
            "exchange": {"overlap": overlap, "codec": scenario.codec},
            "rendezvous": {"patience": max(60.0, 2 * scenario.phase_seconds)},  # a group waits for its slowest member
        }
        if self.invitations is not None:
            run |= {"admission": "invite", "owner": self.invitations.public}
        own = {
            "initial_peers": [f"{self.bootstrap.address}/p2p/{self.bootstrap.peer_id}"],
            "network": {"reach": "auto" if scenario.nats else "public", "upnp": False, "host": "10.0.0.1"},
            "checkpoint": {"every_rounds": 2},
        }
        return Config.model_validate({"run": run, "peer": own})

    def start(self, peer: SimulatedPeer) -> None:
        """Start a process of this peer, unless one runs."""
        if self.stopping or (peer.process is not None and not peer.process.dead and not peer.ended):
            return
        peer.lives, peer.ended = peer.lives + 1, ""
        if peer.out == float("inf"):
            peer.due = min(peer.due, self.loop.time())
        peer.process, peer.stop, peer.pause = Process(peer.name, peer.skew), Stop(), Pause()
        self.say(peer.name, f"starts (life {peer.lives})")
        self.runtime.start(peer.process, self._live, peer)

    def _live(self, peer: SimulatedPeer) -> None:
        def joined(peer: SimulatedPeer) -> None:
            self.say(peer.name, "has joined")
            self.ledger.watch(peer)
            self.promises.watch(peer)
            self.conduct.watch(peer)

        peer.main(joined)
        clock.sleep(0.2)  # its tasks end
        self.say(peer.name, f"ended: {peer.ended}")
        if peer.ended.startswith("RunError: the network thread gave no answer"):
            self.violation(f"{peer.name} waited beyond a deadline: {peer.ended}")
        assert peer.process is not None
        peer.process.dead = True
        if not self.stopping and peer.ended != "done":  # as a user would
            self.loop.call_later(RESTART + 10, self.start, peer, context=NOBODY)

    def boot(self) -> None:
        self.bootstrap_process = Process("bootstrap")
        self.runtime.start(self.bootstrap_process, self._be_bootstrap)

    def _be_bootstrap(self) -> None:
        settings = NodeSettings(identity=None, host="10.0.0.1", port=0)
        who = MemberIdentity("bootstrap", run="", config="", canonical="", layout="")
        if self.invitations is not None:
            self.announcer = self.invitations.authority(self.bootstrap.peer_id)
            self.announcer.admission.learn(self.invitations.revocations)
        self.bootstrap_node, self.booted = (
            self.node(settings, self.announcer, who, host=self.bootstrap),
            self.loop.time(),
        )
        self.bootstrap_node.start()

    def node(self, *arguments: Any, host: Host | None = None) -> SimulatedNode:
        """What the product gets for ``MemberNode``."""
        process, bad_relay = PROCESS.get(), ""
        if host is None:
            peer = next(peer for peer in self.peers if peer.process is process)
            host, bad_relay = peer.host, peer.bad_relay
        node = SimulatedNode(*arguments, network=self.network, host=host, everyone=self.nodes)
        node.bad_relay = bad_relay
        return node

    def rounds(self, peer: SimulatedPeer) -> list[Row]:
        """The rows of its ``rounds.jsonl``."""
        return read_rows(peer.folder / ROUNDS)

    # -- the run

    def run(self) -> Report:
        """Until all peers have ended."""
        before, places = resources.MemberNode, relay.RESERVATIONS
        resources.MemberNode = self.node  # type: ignore[assignment,misc]
        relay.RESERVATIONS = self.scenario.reservations
        try:
            with self.runtime.installed(), deadlines.watched(self):
                self._schedule()
                self.loop.run_until_complete(self._whole())
        except Stuck:
            self.violation("nothing happens any more, and somebody waits")
        finally:
            resources.MemberNode, relay.RESERVATIONS = before, places  # type: ignore[misc]
            self.report.virtual_seconds, self.report.steps = self.loop.time(), self.loop.steps
            self.report.merges, self.report.outcomes = self.ledger.merged, self.ledger.outcomes
        return self.report

    def _schedule(self) -> None:
        self.boot()
        for peer, machine in zip(self.peers, self.scenario.machines, strict=True):
            self.loop.call_later(1.0 + machine.starts, self.start, peer)
        for fault in self.scenario.faults:
            self.loop.call_later(fault.at, Faults(self).happen, fault)

    async def _whole(self) -> None:
        await asyncio.sleep(self.scenario.seconds - LAST_LOOK)
        self.promises.look()
        await asyncio.sleep(LAST_LOOK)
        self.promises.at_the_end()
        self.stopping = True
        self.say("world", "all are asked to stop")
        for peer in self.peers:
            peer.stop.request()
        until = self.loop.time() + STOPPING
        while any(peer.process is not None and not peer.process.dead for peer in self.peers):
            if self.loop.time() > until:
                left = [peer.name for peer in self.peers if peer.process is not None and not peer.process.dead]
                self.violation(f"{', '.join(left)} did not end within {STOPPING:.0f} s")
                break
            await asyncio.sleep(0.5)


class _Trace(logging.Handler):
    """The product's log lines, in the trace if ``shows``. Work in the background that fails is a violation."""

    def __init__(self, world: World, shows: bool) -> None:
        super().__init__()
        self._world, self._shows = world, shows

    def emit(self, record: logging.LogRecord) -> None:
        process, line = PROCESS.get(), record.getMessage()
        if line.startswith("a background task"):
            self._world.violation(line)
        if self._shows:
            self._world.say(process.name if process is not None else "-", f". {line}")


@contextmanager
def in_a_folder(scenario: Scenario, say: Callable[[str], None] | None = None, *, log: bool = False) -> Iterator[World]:
    """The world of a scenario, with a folder for its peers. ``log``: with their log lines in the trace.

    Nothing is collected until :func:`collect`, which is called when nobody holds the world any more. What was alive at
    a ``gc.freeze()`` is never collected: it is called before anything is that will hold the world.
    """
    product = logging.getLogger(LOGGER)
    handlers, propagate, level = product.handlers, product.propagate, product.level
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # what a killed process leaves has no event loop
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=FOLDERS))
    torch.set_num_threads(1)
    gc.disable()  # half of the time, and it would run generators of killed processes in somebody else's turn
    try:
        world = World(scenario, folder, say)
        product.handlers, product.propagate = [_Trace(world, log)], False
        product.setLevel(logging.DEBUG if log else logging.ERROR)
        yield world
        world.loop.complain = lambda context: None  # of what the collection finds
    finally:
        product.handlers, product.propagate = handlers, propagate
        product.setLevel(level)
        shutil.rmtree(folder)
        sys.unraisablehook = hook


def collect() -> None:
    """What is left of the worlds that nobody holds."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of processes killed before their first await
        warnings.simplefilter("ignore", ResourceWarning)  # the event loop
        gc.enable()  # from here on an allocation may collect
        for _ in range(2):  # what a generator of a killed process had in its hands is free when that one is closed
            gc.collect()
    sys.unraisablehook = hook


def simulate(scenario: Scenario, say: Callable[[str], None] | None = None, *, log: bool = False) -> Report:
    """Run one scenario."""
    gc.freeze()  # the collection looks at this world only
    with in_a_folder(scenario, say, log=log) as world:
        report = world.run()
    del world
    collect()
    return report
