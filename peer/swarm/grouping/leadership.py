"""Who leads a group of everyone, by this peer's own rounds and by what members say of it.

Who has led the last round leads the next one. When there is no such member, the smallest id leads, of those that have
taken part in a round before those that have not: a small id is free. Who has led a round that failed leads after all
others for a while, each time for twice as long, or until a round has had no group: a leader can make others look
guilty. All members of a round see the same, so as a rule they have the same leader. Where they have not, the one that
is asked names its own. Of two that lead, as after a split, one follows the other (:meth:`Leadership.claimed`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from peer.p2p.node import Node
from peer.rounds.backoff import PeerBackoff

ROUNDS_ALONE = 2  # rounds without a group, after which a claim is believed again


class Leadership:
    """``seconds``: for which a claim or a failed leader counts less, the first time."""

    def __init__(self, node: Node, seconds: Callable[[], float]) -> None:
        self._node, self._seconds = node, seconds
        self.established = False  # this peer has taken part in a round
        self._named = ""  # the leader that another member has named, for this round
        self._incumbent = ""  # who has led the last round, which has merged
        self._failed = PeerBackoff()
        self._claims = PeerBackoff()  # whose claim has cost time; under the key "": no claim is believed
        self._rounds_alone = 0  # without a group, since the last one that has merged

    def among(self, others: Collection[str]) -> str:
        """The id of who leads, of ``others`` and this peer."""
        everybody = [self._node.peer_id, *others]
        return self._named if self._named in everybody else min(everybody, key=self._rank)

    def _rank(self, peer_id: str) -> tuple[bool, bool, bool, str]:
        """The member with the least one leads."""
        new = not self.established if peer_id == self._node.peer_id else peer_id not in self._node.proven
        return self._failed.avoided(peer_id), peer_id != self._incumbent, new, peer_id

    @property
    def grouped(self) -> bool:
        """Its last round was one of a group. One that leads nobody follows one that does."""
        return self.established and not self._rounds_alone

    def named(self, peer_id: str) -> None:
        """The member that was asked to lead names this one."""
        self._named = peer_id

    def claimed(self, peer_id: str, *, established: bool) -> None:
        """This peer leads, and a member says that it does, and whether its last round was one of a group.

        Both know which of them goes on. A claim is free: after one that was believed in vain, none is believed for a
        while, each time for twice as long. Who stays without a group believes others: those that distrust one another
        would each lead.
        """
        first = (not established, peer_id) < (not self.grouped, self._node.peer_id)
        vain = self._claims.avoided(peer_id) or (self._claims.avoided("") and self._rounds_alone < ROUNDS_ALONE)
        if first and not (vain or self._failed.avoided(peer_id)):
            self._named = peer_id

    def followed_in_vain(self, peer_id: str) -> None:
        """Believe no claim for a while, if this member was followed because it, or another one, said that it leads."""
        if peer_id == self._named:
            self._named = ""
            for key in ("", peer_id):
                self._claims.note(key, self._seconds(), offence=True)

    def ended(self, leader: str, culprits: Sequence[str] = (), *, merged: bool) -> None:
        """A round has ended that ``leader`` led, if anybody. ``culprits``: they have made it fail.

        Without a group, others may see other failures than this peer, as one that has come back: each would lead.
        """
        if leader and not merged:
            self.followed_in_vain(leader)
        self._named = ""
        self.established = self.established or merged
        self._incumbent = leader if merged else ""
        self._rounds_alone = 0 if merged else self._rounds_alone + (not leader)
        if not leader:
            self._failed = PeerBackoff()
        elif not merged:
            for peer_id in {leader, *culprits}:
                self._failed.note(peer_id, self._seconds(), offence=True)
