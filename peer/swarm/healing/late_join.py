"""A peer that could not find its swarm at the start finds it later: the bootstrap node or a network was down.

A mean with its own weights would set the swarm back, so it takes the swarm's weights before it meets a member.

Other peers may have begun with it. Therefore fresh weights have a *root*: the peer that begins with them draws it at
random and gives it to those that take its weights. Two peers that meet agree on the smaller of their roots, so a swarm
soon has one, and both parts keep it after a split.
"""

from __future__ import annotations

from collections.abc import Sequence

STALE_ROUNDS = 2  # so few rounds behind, a peer keeps its own weights: a state costs as much as two swaps


class Origin:
    """How this peer began. Written by the main thread, and by the network thread when it meets a peer."""

    def __init__(self) -> None:
        self.root, self.since = "", 0
        self._alone = False

    def note(self, *, alone: bool, round: int, root: str) -> None:
        """It has looked for others. ``round``: its own, 0 when its weights are fresh."""
        self.root, self.since, self._alone = root, round, alone

    def met(self, root: str) -> None:
        """It has met a peer with this root; their weights will be averaged."""
        self.root, self._alone = min(self.root or root, root or self.root), False

    def late(self, own: int, theirs: int, root: str) -> bool:
        """Does this peer, at round ``own``, gain more than it loses with the weights of a peer at round ``theirs``?

        A peer that has trained longer by itself has as much to give: then both are averaged, as after any split.
        """
        return (self._alone or root != self.root) and theirs - own > max(STALE_ROUNDS, own - self.since)

    def late_to(self, own: int, others: Sequence[tuple[int, str]], *, judged: bool) -> bool:
        """The same for the rounds and roots of all members of a swarm. Among three or more a single one does not count
        unless its weights will be ``judged``: otherwise all would believe a peer that claims a round that nobody has.
        """
        further = sum(self.late(own, theirs, root) for theirs, root in others)
        return further >= (2 if len(others) > 2 and not judged else 1)
