"""Who averages with this peer at a boundary: one interface for methods of pairs, of everyone and of nobody."""

from __future__ import annotations

from peer.rounds.types import Group


class Matching:
    """As it is here, that of a method that averages with nobody."""

    joins_late = False  # a peer that trained apart from its swarm takes the swarm's weights before it meets anybody

    def start(self, round: int) -> None:
        """Look for others and answer them, for the boundary that ends ``round``."""

    def group_for(self, round: int, after: int | None = None) -> Group:
        """Who averages with this peer at the boundary that ends ``round``.

        ``after``: the number of the inner phase that has ended, when the next one runs meanwhile (pairs only).
        """
        return Group(round)

    def avoid(self, peer_id: str, *, offence: bool) -> None:
        """A round has failed by this member: leave it out for a while. ``offence``: it sent what cannot be used."""
