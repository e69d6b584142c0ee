"""What goes wrong in a world: each kind of :class:`tests.simulated.scenario.Fault` is a method of its name."""

from __future__ import annotations

import contextvars
import random
from functools import partial
from typing import TYPE_CHECKING

from peer.process import Pause
from tests.simulated.harm.outsiders import Outsider
from tests.simulated.loop import PROCESS, Process
from tests.simulated.p2p.network import WINDOW
from tests.simulated.peer import SimulatedPeer
from tests.simulated.scenario import Fault

if TYPE_CHECKING:
    from tests.simulated.world import World

OFTEN = 0.2  # of the parts of a peer whose buffers or connections are bad
TRICKLE = 60.0  # bytes a second: a swap that goes on would take minutes
RESTART = 2.0  # seconds from the end of a process to its next start


class Faults:
    """Lets them happen in one world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def happen(self, fault: Fault) -> None:
        peers = [self._world.peers[number] for number in fault.peers]
        names = ", ".join(peer.name for peer in peers)
        self._world.report.faults[fault.kind] += 1
        self._world.say("fault", f"{fault.kind} of {names} for {fault.seconds:.1f} s")
        if fault.kind == "crash":  # at any await: after so many of its events
            for peer in peers:
                if peer.process is not None:
                    peer.process.explode = partial(self._kill, peer, peer.process, fault.seconds)
                    peer.process.fuse = fault.after
        else:
            getattr(self, f"_{fault.kind}")(peers, fault.seconds)

    def _kill(self, peer: SimulatedPeer, process: Process, seconds: float) -> None:
        if self._world.stopping or process.dead:
            return
        self._world.say(peer.name, "is killed")
        self._world.promises.crashed(peer)
        peer.due = float("inf")
        self._world.runtime.kill(process)
        self._world.network.drop_all(peer.host)
        peer.trainer = None
        self._world.loop.call_later(RESTART + seconds, self._world.start, peer)

    def _freeze(self, peers: list[SimulatedPeer], seconds: float) -> None:
        for peer in peers:
            if peer.process is not None and not peer.process.dead:
                peer.process.freeze()
                self._world.loop.call_later(seconds, peer.process.thaw, self._world.loop)

    def _cut(self, peers: list[SimulatedPeer], seconds: float) -> None:
        heal = self._world.network.cut([peer.host for peer in peers], self._world.network.hosts.values())
        self._world.loop.call_later(seconds, heal)

    def _split(self, peers: list[SimulatedPeer], seconds: float) -> None:
        ours = [peer.host for peer in peers]
        rest = [host for host in self._world.network.hosts.values() if host not in ours]
        self._world.loop.call_later(seconds, self._world.network.cut(ours, rest))

    def _drop(self, peers: list[SimulatedPeer], seconds: float) -> None:
        self._world.network.drop(peers[0].host, peers[-1].host)

    def _leave(self, peers: list[SimulatedPeer], seconds: float) -> None:
        for peer in peers:
            peer.stop.request()
            peer.due = float("inf")
            self._world.loop.call_later(60 + seconds, self._world.start, peer)

    def _pause(self, peers: list[SimulatedPeer], seconds: float) -> None:
        for peer in peers:
            peer.pause.requested, peer.paused_at, peer.due = True, self._world.loop.time(), float("inf")
            self._world.loop.call_later(seconds, self._resume, peer, peer.pause)

    def _resume(self, peer: SimulatedPeer, pause: Pause) -> None:
        pause.requested = False
        if peer.pause is pause and peer.out == float("inf") and not peer.ended:
            peer.due = self._world.loop.time()

    def _damage(self, peers: list[SimulatedPeer], seconds: float) -> None:
        for peer in peers:
            peer.host.damage, peer.damaged = OFTEN, True
            self._world.loop.call_later(seconds, setattr, peer.host, "damage", 0.0)

    def _snap(self, peers: list[SimulatedPeer], seconds: float) -> None:
        for peer in peers:
            peer.host.snap = OFTEN
            self._world.loop.call_later(seconds, setattr, peer.host, "snap", 0.0)

    def _trickle(self, peers: list[SimulatedPeer], seconds: float) -> None:
        """Its line carries a few bytes at a time: no deadline for the next byte notices it."""
        for peer in peers:
            self._world.loop.call_later(seconds, self._world.network.slow(peer.host, TRICKLE, 64))

    def _narrow(self, peers: list[SimulatedPeer], seconds: float) -> None:
        """Its buffers are full: after each write it waits until the bytes have arrived."""
        for peer in peers:
            peer.host.window = 0
            self._world.loop.call_later(seconds, setattr, peer.host, "window", WINDOW)

    def _bootstrap(self, peers: list[SimulatedPeer], seconds: float) -> None:
        if not self._world.bootstrap_process.dead:
            self._world.runtime.kill(self._world.bootstrap_process)
            self._world.network.drop_all(self._world.bootstrap)
            self._world.loop.call_later(seconds, self._world.boot)

    def _revoke(self, peers: list[SimulatedPeer], seconds: float) -> None:
        """By the owner, whose list the bootstrap node has."""
        assert self._world.invitations is not None
        for peer in peers:
            self._world.invitations.revoke(peer.host.peer_id)
        if self._world.announcer is not None:
            self._world.announcer.admission.learn(self._world.invitations.revocations)
        self._dismiss(
            peers, self._world.scenario.seconds - self._world.scenario.calm
        )  # the list comes to all that are connected

    def _expire(self, peers: list[SimulatedPeer], seconds: float) -> None:
        self._dismiss(peers, self._world.loop.time())

    def _dismiss(self, peers: list[SimulatedPeer], out: float) -> None:
        for peer in peers:
            peer.out, peer.due = max(out, self._world.loop.time()), float("inf")

    def _outsider(self, peers: list[SimulatedPeer], seconds: float) -> None:
        world = self._world
        host = world.network.add(0.02, 1e7, 1e7)
        host.process = Process("outsider")
        context = contextvars.Context()
        context.run(PROCESS.set, host.process)
        outsider = Outsider(
            self._world.network, host, self._world.peers, random.Random(f"outsider {self._world.scenario.seed}")
        )
        self._world.loop.create_task(outsider.trouble(seconds), context=context)

    def _slow(self, peers: list[SimulatedPeer], seconds: float) -> None:
        for peer in peers:
            before, peer.host.down = peer.host.down, peer.host.down / 20
            self._world.loop.call_later(seconds, setattr, peer.host, "down", before)
