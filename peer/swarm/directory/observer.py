"""The whole swarm as an onlooker sees it: the bootstrap's monitor and ``noloco-peer status``. It is no member itself.

Previous station: reader.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from peer.p2p.node import Node
from peer.swarm.directory.reader import Entry, Reader, read_runs

ONLOOKER_READS = 64  # buckets a look: all of a swarm of some 1,500; of a larger one the rest comes with the next looks
WATCHED_RUNS = 16  # more are not watched


class Onlooker:
    """Finds the runs of a DHT and reads the directory of each. ``look`` on the network thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._readers: dict[str, Reader] = {}
        self._chance = random.Random()

    async def look(self) -> dict[str, Mapping[str, Entry]]:
        """The newest records by run and peer id, with those that say they left, until they expire.

        Raises what hivemind raises when the DHT does not answer.
        """
        fresh = sorted(await read_runs(self._node) - self._readers.keys())
        room = min(max(0, WATCHED_RUNS - len(self._readers)), len(fresh))
        # anybody can write names: at random, so that nobody's crowd others out for long
        for run in self._chance.sample(fresh, room):
            self._readers[run] = Reader(self._node, run)
        for reader in self._readers.values():
            await reader.look(ONLOOKER_READS)
        self._readers = {run: reader for run, reader in self._readers.items() if reader.known}
        return {run: dict(reader.known) for run, reader in self._readers.items()}
