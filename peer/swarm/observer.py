"""The whole swarm as an onlooker sees it: the bootstrap's monitor and ``noloco-peer status``. It is no member itself.

Previous station: reading.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from peer.swarm import directory
from peer.swarm.node import Node
from peer.swarm.reading import Entry, is_live, read_buckets, read_runs

READS = 64  # buckets a look: all of a swarm of some 1,500; of a larger one the rest comes with the next looks
RUNS = 16  # more are not watched
WIDE_LOOKS = 12  # between two looks at all levels of the directory


class Observer:
    """What is known of one run. ``look`` on the network thread; records are kept until they expire."""

    def __init__(self, node: Node, run: str) -> None:
        self._node, self.run = node, run
        self._known: dict[str, Entry] = {}
        self._estimate = 1.0
        self._looks = 0
        self._chance = random.Random()

    async def look(self) -> Mapping[str, Entry]:
        """Read the directory and return the newest record of each peer, by id, with those that say they left."""
        near = self._estimate if self._looks % WIDE_LOOKS else None
        self._looks += 1
        buckets = directory.reads(self._estimate, READS, self._chance)
        buckets += [it for it in directory.probes(self._node.peer_id, near) if it not in buckets]
        found = await read_buckets(self._node, self.run, buckets)
        now = time.time()
        for entries in found.values():
            for entry in entries:
                known = self._known.get(entry.record.peer_id)
                if known is None or known.expires < entry.expires:
                    self._known[entry.record.peer_id] = entry
        self._known = {key: entry for key, entry in self._known.items() if entry.expires > now}
        counts = {it: sum(is_live(entry, now) for entry in entries) for it, entries in found.items()}
        self._estimate = directory.smoothed(self._estimate, directory.estimate(counts))
        return dict(self._known)


class Onlooker:
    """Finds the runs of a DHT and observes each of them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._observers: dict[str, Observer] = {}
        self._chance = random.Random()

    async def look(self) -> dict[str, Mapping[str, Entry]]:
        """The newest records by run and peer id. Raises what hivemind raises when the DHT does not answer."""
        fresh = sorted(await read_runs(self._node) - self._observers.keys())
        room = max(0, RUNS - len(self._observers))
        for run in self._chance.sample(
            fresh, min(room, len(fresh))
        ):  # anybody can write names: none may crowd others out
            self._observers[run] = Observer(self._node, run)
        found = {run: await observer.look() for run, observer in self._observers.items()}
        self._observers = {run: it for run, it in self._observers.items() if found[run]}
        return found
