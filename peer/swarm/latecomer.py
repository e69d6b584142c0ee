"""A peer that began where nobody was to be seen, and whose swarm is found later: its bootstrap node came back and did
not know the others yet, or a network was cut. What it trained meanwhile is little beside what they have, so it takes
their weights before it meets any of them; a merge with it would set them back.

Previous station: join.py. Next stations: rendezvous.py, which meets nobody meanwhile, and joining.py.
"""

from __future__ import annotations

STALE_ROUNDS = 2  # a peer that is as little behind keeps its own weights: a state costs what two swaps cost


class Beginning:
    """How this peer began. Written by the main thread until others are met, read by the network's."""

    def __init__(self) -> None:
        self._alone, self.since = False, 0

    def note(self, *, alone: bool, round: int) -> None:
        """It looked for others. ``round``: its own, 0 when it has no checkpoint."""
        self._alone, self.since = alone, round

    def over(self) -> None:
        """Somebody was met."""
        self._alone = False

    def late(self, own: int, theirs: int) -> bool:
        """Would a peer at round ``own`` give up less than it gains with the weights of one at ``theirs``?

        Who was alone for longer has as much to give as others: then the two halves are averaged, as after any split.
        """
        return self._alone and theirs - own > max(STALE_ROUNDS, own - self.since)
