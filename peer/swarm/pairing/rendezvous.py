"""Meeting a random partner without waiting for one.

During its inner steps a peer proposes to live members: those it has met longest ago first, at random among equals,
so weights mix faster (README, "Convergence"). Two peers whose boundaries are near each other commit to a meeting, and
the stream between them stays open: it *is* the meeting. At the boundary each side says ``Ready`` on it and the swap
runs over it. If the partner dies first it ends, which frees the other one at once. Who has no meeting asks around.

Whoever proposes first chooses, so each peer starts to propose at a random time of its inner phase. If all started
at their boundary, two peers that have just met would always find each other first, and never mix with the rest.

Previous stations: proposing.py, appointment.py. Next station: exchange/pair.py, which gets the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from peer.config.schema import RendezvousConfig
from peer.logs import fields, get_logger
from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.stream import StreamLost
from peer.rounds.types import Group, Link
from peer.swarm.context import SwarmContext
from peer.swarm.healing.late_join import Beginning
from peer.swarm.pairing.agreement import Appointment
from peer.swarm.pairing.messages import Meeting, Ready
from peer.swarm.pairing.proposals import ANSWER_TIMEOUT, PROTOCOL, Proposing

log = get_logger("rendezvous")

SLACK = 2.0  # seconds that a partner may come late, on top of half the time it announced


class Rendezvous:
    """Agrees on partners in the background; :meth:`group_for` is the loop's only call."""

    def __init__(self, footing: SwarmContext, settings: RendezvousConfig, beginning: Beginning) -> None:
        self._node, self._boundary, self._stop = footing.node, footing.boundary, footing.stop
        self._beginning = beginning
        self._agreed = Appointment(footing)
        self._proposing = Proposing(footing, settings, beginning, self._agreed)

    # -- from the main thread

    def start(self, round: int) -> None:
        """Take proposals and make them, for the boundary that ends ``round``."""
        self._agreed.round = round
        self._node.call(self._node.serve_members(PROTOCOL, self._proposing.answer), OPEN_TIMEOUT)
        self._node.spawn(self._proposing.seek())

    def group_for(self, round: int) -> Group:
        """The partner that stands at this boundary too, or nobody. Never waits longer than was announced."""
        return self.group_beside(round, self._boundary.number, 0.0)

    def group_beside(self, round: int, phase: int, linger: float) -> Group:
        """The same for the boundary after inner phase number ``phase``, while the next one may be running already.

        A peer that loses nothing by waiting looks for a partner for ``linger`` seconds before it stays alone.
        """
        self._agreed.round = round
        patience = linger + 4 * (self._boundary.phase or 0.0) + 4 * (SLACK + ANSWER_TIMEOUT)
        return self._node.call(self._gather(phase, linger), patience)

    def avoid(self, peer_id: str) -> None:
        """What it sent could not be used: do not meet it for a while."""
        self._proposing.avoid(peer_id)

    def forgive(self, peers: Iterable[str]) -> None:
        """Their weights have something in common with ours by now."""
        self._proposing.forgive(peers)

    # -- on the network thread

    async def _gather(self, phase: int, linger: float) -> Group:
        agreed, until = self._agreed, time.monotonic() + linger
        try:
            with self._boundary.standing(phase):
                for _ in range(2):  # the agreed meeting, and one more try if it falls through
                    while agreed.meeting is None:
                        await self._proposing.ask_around()
                        if agreed.meeting is not None or self._stop.requested or time.monotonic() >= until:
                            break
                        await asyncio.sleep(self._proposing.pause())
                    if agreed.meeting is None:
                        break
                    link = await self._meet(agreed.meeting)
                    if link is not None:
                        self._proposing.met(link.peer_id)
                        return Group(agreed.round, (link,))
                return Group(agreed.round)
        finally:
            agreed.pass_on()

    async def _meet(self, meeting: Meeting) -> Link | None:
        """Tell the partner that we are here and wait for it as long as it said it would take."""
        reason = "left"
        try:
            await meeting.stream.send(Ready(), ANSWER_TIMEOUT)
            until = time.monotonic() + 1.5 * meeting.their_eta() + SLACK
            while not meeting.word.done() and time.monotonic() < until and not self._stop.requested:
                await asyncio.wait([meeting.word], timeout=min(0.2, until - time.monotonic()))
            if meeting.word.done() and meeting.word.result():
                self._beginning.met(meeting.root)
                return Link(meeting.stream.remote, meeting.name, meeting.stream)
            if not meeting.word.done():
                reason = "did not come in time"
        except (TimeoutError, StreamLost) as error:
            reason = str(error) or "does not answer"
        log.info("no meeting: %s", fields(partner=meeting.name, reason=reason, round=self._agreed.round))
        self._agreed.drop(meeting)
        return None
