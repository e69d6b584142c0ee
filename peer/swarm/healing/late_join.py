"""A peer that began where its swarm was not to be seen, and finds it later: a bootstrap node came back and did not know
the others yet, or a network was cut. Averaged into their weights, what it trained meanwhile would set them back. So it
takes theirs before it meets any of them.

It need not have been alone: others may have begun with it. Therefore fresh weights have a *root*, drawn at random by
who began with them and handed on with them. Two peers that meet agree on the smaller of theirs, so a swarm soon has
one, and its halves keep it when they are split.

Previous station: state_transfer. Next stations: pairing/proposals.py, which meets nobody meanwhile, and presence.py.
"""

from __future__ import annotations

from collections.abc import Sequence

STALE_ROUNDS = 2  # a peer that is as little behind keeps its own weights: a state costs what two swaps cost


class Origin:
    """How this peer began. Written by the main thread, and by the network's when somebody is met."""

    def __init__(self) -> None:
        self.root, self.since = "", 0
        self._alone = False

    def note(self, *, alone: bool, round: int, root: str) -> None:
        """It looked for others. ``round``: its own now, 0 when its weights are fresh."""
        self.root, self.since, self._alone = root, round, alone

    def met(self, root: str) -> None:
        """Somebody with this root, and what both have will be averaged."""
        self.root, self._alone = min(self.root or root, root or self.root), False

    def late(self, own: int, theirs: int, root: str) -> bool:
        """Would this peer, at round ``own``, give up less than it gains with the weights of one at ``theirs``?

        Who was away for longer has as much to give as others: then the two halves are averaged, as after any split.
        """
        return (self._alone or root != self.root) and theirs - own > max(STALE_ROUNDS, own - self.since)

    def late_to(self, own: int, others: Sequence[tuple[int, str]], *, judged: bool) -> bool:
        """The same for a swarm, by the rounds and roots of all its members. Among three or more a single one does not
        count unless what it gives will be ``judged``: who claims a round that nobody has would be believed by all.
        """
        further = sum(self.late(own, theirs, root) for theirs, root in others)
        return further >= (2 if len(others) > 2 and not judged else 1)
