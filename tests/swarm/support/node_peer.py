"""A presence on a real node. Its inner steps are sleeps, so that many rounds fit into a test."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from peer.config.schema import SwarmRunConfig
from peer.p2p import identity
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.settings import NodeSettings
from peer.process import LoopContext, Stop
from peer.rounds.progress import Progress
from peer.rounds.state import Lineage, State
from peer.rounds.types import Group, Grouping
from peer.swarm.directory.records import NO_REPORT
from peer.swarm.presence import Presence

STEPS, STEP_SECONDS = 10, 0.1
SWAP_SECONDS = 0.3


class Peer:
    """A member of a swarm that trains nothing."""

    def __init__(
        self,
        name: str,
        folder: Path,
        initial: tuple[str, ...],
        *,
        grouping: Grouping = Grouping.PAIR,
        snapshot: Callable[[], State] | None = None,
        tokens_per_step: float = 0.0,
        config: str = "c",
    ) -> None:
        key = folder / f"{name}.key"
        identity.load_or_create(key)
        self.name, self.round, self.lineage = name, 0, Lineage()
        self.pace = 1.0
        self.partners: Counter[str] = Counter()
        self.waits: list[float] = []
        self.groups: list[Group] = []
        self.progress, self.stop = Progress(), Stop()
        member = MemberIdentity(name, "test", config, "{}", "layout")
        self.node = MemberNode(NodeSettings(key, "127.0.0.1", 0, initial_peers=initial, bulk_port="auto"), None, member)
        self.node.start()
        self.presence = Presence(
            self.node,
            SwarmRunConfig(inner_steps=100),
            grouping=grouping,
            equal_replicas=False,
            training=LoopContext(self.progress, self.stop),
            counters=self,
            step=lambda: self.round * STEPS,
            report=lambda: NO_REPORT,
            metrics_address=None,
            tokens_per_step=lambda: tokens_per_step,
        )
        self.presence.enter(snapshot or _no_state, 0)

    def inner_phase(self) -> None:
        """Ten inner steps of sleep."""
        self.progress.begin(STEPS, STEPS)
        for _ in range(STEPS):
            time.sleep(STEP_SECONDS * self.pace * random.uniform(0.9, 1.1))
            self.progress.tick()
            if self.stop.requested:
                return

    def meet(self) -> Group:
        """The group of this boundary; appends the waiting time to ``waits``."""
        began = time.monotonic()
        group = self.presence.group_for(self.round)
        self.waits.append(time.monotonic() - began)
        self.groups.append(group)
        return group

    def train(self, rounds: int) -> None:
        """Make rounds in which the group only closes its streams."""
        for _ in range(rounds):
            self.inner_phase()
            if self.stop.requested:
                return
            group = self.meet()
            self.round += 1
            self.partners.update(link.name for link in group.links)
            self.part(group)

    def part(self, group: Group) -> None:
        """Close the group's streams, as after a short swap: the partner must have come to its boundary."""
        streams = [link.stream for link in group.links if link.stream is not None]
        streams += list(group.assembly.controls.values()) if group.assembly else []
        for stream in streams:
            self.node.loop.call_soon_threadsafe(self.node.loop.call_later, SWAP_SECONDS, stream.close)


def _no_state() -> State:
    raise AssertionError("no peer should ask for the state")


def in_threads(*works: Callable[[], object]) -> list[threading.Thread]:
    """Start each in a separate thread."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def join_all(threads: list[threading.Thread], seconds: float = 90) -> None:
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
