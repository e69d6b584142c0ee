"""Which member of a group of everyone leads, by this peer's own rounds and by what members say.

1. A member that another one has named as the leader leads this round.
2. Otherwise the leader of the last round leads again, if that round has merged.
3. Otherwise the smallest id leads. Members that have taken part in a round come before those that have not: anybody can
   make a small id.

A member that has led a failed round, was a culprit of one, or has twice let this peer into no group comes last for a
while: a leader can make others look guilty. That time doubles with each failure and ends after a round without a group.

All members of a round see the same outcome, so they usually choose the same leader. If they do not, a member that is
asked to lead names its own leader. If two members lead, as after a split, one follows the other
(:meth:`Leadership.claimed`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from peer.p2p.node import Node
from peer.rounds.backoff import PeerBackoff

ROUNDS_ALONE = 2  # rounds without a group, after which a claim is believed again


class Leadership:
    """``seconds``: how long a vain claim or a failed round counts against a member, the first time."""

    def __init__(self, node: Node, seconds: Callable[[], float]) -> None:
        self._node, self._seconds = node, seconds
        self.established = False  # this peer has taken part in a round
        self._named = ""  # the leader that another member has named, for this round
        self._incumbent = ""  # who has led the last round, which has merged
        self._failed = PeerBackoff()
        self._declined = PeerBackoff()  # who has let this peer into no group, remembered as long as a failure
        self._declined_again = PeerBackoff()  # comes last as one that failed, but its claim is believed
        self._claims = PeerBackoff()  # whose claim has cost time; under the key "": no claim is believed
        self._rounds_alone = 0  # without a group, since the last one that has merged

    def among(self, others: Collection[str]) -> str:
        """The id of the leader among ``others`` and this peer."""
        everybody = [self._node.peer_id, *others]
        return self._named if self._named in everybody else min(everybody, key=self._rank)

    def _rank(self, peer_id: str) -> tuple[bool, bool, bool, str]:
        """The member with the smallest rank leads."""
        new = not self.established if peer_id == self._node.peer_id else peer_id not in self._node.proven
        last = self._failed.avoided(peer_id) or self._declined_again.avoided(peer_id)
        return last, peer_id != self._incumbent, new, peer_id

    @property
    def grouped(self) -> bool:
        """This peer has merged with a group, and has had no round without one since."""
        return self.established and not self._rounds_alone

    def named(self, peer_id: str) -> None:
        """A member that was asked to lead has named ``peer_id`` as the leader."""
        self._named = peer_id

    def claimed(self, peer_id: str, *, established: bool) -> None:
        """This peer leads, and member ``peer_id`` says that it leads. ``established``: it says that its last round was
        one of a group.

        Both decide by the same rule: the one whose last round was one of a group leads; of two equals, the smaller id.
        A claim costs nothing. So after a claim that was believed in vain, this peer believes none for a while, and
        twice as long after each further one. After ``ROUNDS_ALONE`` rounds without a group it believes the claims of
        members that have not disappointed it: if all members distrusted one another, each would lead.
        """
        first = (not established, peer_id) < (not self.grouped, self._node.peer_id)
        vain = self._claims.avoided(peer_id) or (self._claims.avoided("") and self._rounds_alone < ROUNDS_ALONE)
        if first and not (vain or self._failed.avoided(peer_id)):
            self._named = peer_id

    def followed_in_vain(self, peer_id: str) -> None:
        """``peer_id`` has led this peer into no round. If a message had named it, believe no claim for a while."""
        if peer_id == self._named:
            self._named = ""
            for key in ("", peer_id):
                self._claims.note(key, self._seconds(), offence=True)

    def ended(self, leader: str, culprits: Sequence[str] = (), *, merged: bool, declined: str = "") -> None:
        """A round has ended. ``leader``: who led it, empty when there was no group. ``culprits``: who made it fail.

        ``declined``: who was asked to lead, and has declined or named another leader until this peer gave up. Its group
        may have been full, or this peer too late; the second time it leads after the others, as a leader whose round
        has failed, also after rounds that have merged. Unlike such a one it is followed again when it claims to lead.

        After a round without a group, all failures are forgotten. Other members may have seen other failures, as when
        this peer has come back. They would choose another leader, and each of them would lead a group of its own.
        """
        self._rounds_alone = 0 if merged else self._rounds_alone + (not leader)
        if declined:
            leader = declined if self._declined.knows(declined) else ""
            self._declined.note(declined, self._seconds(), offence=False)
        if leader and not merged:
            self.followed_in_vain(leader)
        self._named = ""
        self.established = self.established or merged
        self._incumbent = leader if merged else ""
        if not leader:
            self._failed, self._declined_again = PeerBackoff(), PeerBackoff()
        elif not merged:
            failed = self._declined_again if declined else self._failed
            for peer_id in {leader, *culprits}:
                failed.note(peer_id, self._seconds(), offence=True)
