"""Matchmaking finds the group of each boundary: the interface of pairing/matchmaking.py and grouping/matchmaking.py."""

from __future__ import annotations

from peer.rounds.contribution import Averaged
from peer.rounds.types import Group


class Matchmaking:
    """Finds the group of each boundary. This class is for methods that average with nobody."""

    joins_late = False  # a peer that trained apart from its swarm takes the swarm's weights before it meets a member

    def start(self, round: int) -> None:
        """Look for others and answer them, for the boundary that ends ``round``."""

    def group_for(self, round: int, ended_phase_number: int | None = None) -> Group:
        """The group that averages at the boundary that ends ``round``. Blocks. Called from the training thread, or,
        with ``ended_phase_number``, from the helper thread of an overlapped swap.

        ``ended_phase_number``: number of the inner phase that has ended, if the next one runs meanwhile (pairs only);
        ``None``: this peer waits at the boundary.
        """
        return Group(round)

    def postpone(self) -> None:
        """No swap begins at this boundary, as the last one still runs: a meeting for it is off (pairs only)."""

    def call_off(self, reason: str) -> None:
        """See :meth:`peer.swarm.presence.Presence.call_off`."""

    def end_run(self) -> None:
        """This peer has made its last inner step: from now on it meets only peers that have too (pairs only)."""

    def end_swaps(self) -> None:
        """After :meth:`end_run`: this peer has made its last swap, nobody shall wait for it (pairs only)."""

    def last_partners(self) -> int:
        """After :meth:`end_run`: the members that may still be met, 0 when there is no time left to wait for them."""
        return 0

    def avoid(self, peer_id: str, *, offence: bool, late: bool = False) -> None:
        """A round failed because of this member: leave it out for a while. ``offence``: it sent unusable data, or is
        not known to have done better. ``late``: it sent nothing in time; once, that costs less (pairs only).
        """

    def gave_no_state(self, peer_id: str, *, worse: bool = False) -> None:
        """This member was said to have the group's slow weights. This peer did not get them, or they are ``worse`` than
        its own: nobody shall wait for it.
        """

    def ended(self, group: Group, averaged: Averaged) -> None:
        """The exchange of this group has ended."""
