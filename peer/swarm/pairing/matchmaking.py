"""Meets a random partner without waiting for one.

During its inner steps a peer proposes to live members, in the order of rounds/pairing_rule.py. Two peers whose
boundaries are near each other commit to a meeting, and the stream between them stays open: it *is* the meeting. At the
boundary each side says that it is ready, and the swap (exchange/pair) runs over that stream. When a partner dies its
stream ends, which frees the other one at once. A peer without a meeting proposes again at its boundary.

The first proposer chooses, so each peer starts to propose at a random time of its inner phase. If all started at their
boundary, two peers that have just met would always find each other first and never mix with the rest.
"""

from __future__ import annotations

import asyncio

from peer import clock
from peer.config.schema import RendezvousConfig
from peer.logs import fields, get_logger
from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.stream import MESSAGE_TIMEOUT, StreamLost
from peer.rounds.backoff import BACKOFF_PHASES
from peer.rounds.progress import LATE_SLACK, may_be_late
from peer.rounds.types import Group, Link
from peer.swarm.context import SwarmContext
from peer.swarm.healing import Origin
from peer.swarm.matchmaking import Matchmaking
from peer.swarm.pairing.agreement import Agreement, Meeting, PartnerReady
from peer.swarm.pairing.proposals import MEET_PROTOCOL, Proposals

log = get_logger("pairing")

MISSED_PHASES = 1.0  # inner phases for which a partner that did not come once is left out
LINGER_PHASES = 0.25  # inner phases for which an overlapped peer looks for a partner before it goes on alone
MEETINGS_TRIED = 2  # at a boundary: the agreed one, and another one if it fails
# Inner phases, late partners and messages for which the training thread waits for the network thread. Each meeting may
# take one and a half phases, as a partner may be late by half of the time that it announced: two take three, and the
# rest is for proposals.
WAIT_FACTOR = 4.0


class PairMatchmaking(Matchmaking):
    """Pairs: agrees on partners in the background."""

    joins_late = True

    def __init__(self, context: SwarmContext, settings: RendezvousConfig, origin: Origin) -> None:
        self._context, self._node, self._boundary = context, context.node, context.boundary
        self._origin = origin
        self._patience = 0.0  # seconds that are left to wait for partners after the last inner step
        self._agreement = Agreement(context, self._missed)
        self._proposals = Proposals(context, settings, origin, self._agreement)

    # -- from the training thread

    def start(self, round: int) -> None:
        self._agreement.round = round
        self._node.call(self._node.serve_members(MEET_PROTOCOL, self._proposals.answer), OPEN_TIMEOUT)
        self._node.keep(self._proposals.seek)

    def group_for(self, round: int, ended_phase_number: int | None = None) -> Group:
        """The partner that is at this boundary too, or none. Never waits longer than announced."""
        self._agreement.round = round
        phase_seconds = self._boundary.progress.phase_seconds
        linger = 0.0 if ended_phase_number is None else LINGER_PHASES * phase_seconds
        if self._boundary.run_ended:
            linger = self._patience
        patience = linger + WAIT_FACTOR * (phase_seconds + LATE_SLACK + MESSAGE_TIMEOUT)
        phase_number = self._boundary.progress.phase_number if ended_phase_number is None else ended_phase_number
        return self._node.call(self._meet(phase_number, linger), patience)

    def postpone(self) -> None:
        self._node.spawn(self._agreement.postpone())

    def call_off(self, reason: str) -> None:
        self._node.spawn(self._agreement.call_off(reason))

    def end_run(self) -> None:
        self._patience = self._boundary.end_patience
        self._node.call(self._agreement.end_run(), OPEN_TIMEOUT)

    def end_swaps(self) -> None:
        self._node.call(self._agreement.end_swaps(), OPEN_TIMEOUT)

    def last_partners(self) -> int:
        return self._proposals.count() if self._patience > 0 else 0

    def avoid(self, peer_id: str, *, offence: bool, late: bool = False) -> None:
        phase_seconds = self._boundary.progress.phase_seconds or 1.0
        once = not offence or (late and not self._context.backoff.remembers(peer_id))  # it may have saved, or was busy
        phases = MISSED_PHASES if once else BACKOFF_PHASES
        seconds = self._context.backoff.note(peer_id, phases * phase_seconds, offence=offence)
        log.warning("avoids a peer: %s", fields(peer=self._context.members.name_of(peer_id), seconds=seconds))
        self._node.spawn(self._agreement.drop(peer_id))

    # -- on the network thread

    async def _meet(self, phase_number: int, linger: float) -> Group:
        """At the boundary that ends inner phase ``phase_number``."""
        agreement, began = self._agreement, clock.monotonic()
        until = began + linger
        try:
            with self._boundary.at_end_of(phase_number):
                for _ in range(MEETINGS_TRIED):
                    while agreement.meeting is None:
                        await self._proposals.ask_around()
                        if agreement.meeting is not None or self._context.away or clock.monotonic() >= until:
                            break
                        if self._boundary.run_ended and not self._proposals.count():
                            break
                        await asyncio.sleep(self._proposals.pause())
                    if agreement.meeting is None:
                        break
                    link = await self._partner_of(agreement.meeting, linger)
                    if link is not None:
                        self._proposals.met(link.peer_id)
                        agreement.came(link.peer_id)
                        self._boundary.progress.swap_begins()
                        return Group(agreement.round, (link,))
                return Group(agreement.round)
        finally:
            agreement.end_round()
            if self._boundary.run_ended:
                self._patience -= clock.monotonic() - began

    async def _partner_of(self, meeting: Meeting, linger: float) -> Link | None:
        """Tell the partner that this peer is here; wait for it as long as it announced. ``linger``: seconds on top."""
        phase_seconds, reason = self._boundary.progress.phase_seconds, "left"
        if phase_seconds and meeting.their_eta() > phase_seconds:  # this peer is here much earlier than it announced
            self._cancel(meeting, "comes more than a phase later")
            return None
        try:
            await meeting.stream.send(PartnerReady(), MESSAGE_TIMEOUT)
            eta = meeting.their_eta()
            for patience in clock.slices(eta + may_be_late(eta) + linger):
                await asyncio.wait([meeting.came], timeout=patience)
                if meeting.came.done() or self._context.away:
                    break
            if meeting.came.done() and meeting.came.result() and not meeting.stream.ended:
                self._origin.met(meeting.root)
                return Link(meeting.stream.remote, meeting.name, meeting.stream)
            if not meeting.came.done() and not self._context.away:
                reason = "did not come in time"
                self._missed(meeting.stream.remote)
        except (TimeoutError, StreamLost) as error:
            reason = str(error) or "does not answer"
        in_time = -meeting.own_wait() <= may_be_late(meeting.own_eta)  # so long it waits for this peer
        if in_time and not self._context.away and meeting.came.done() and meeting.came.result():
            self._agreement.note_called_off(meeting)  # it said that it was here
        self._cancel(meeting, reason)
        return None

    def _missed(self, peer_id: str) -> None:
        """It did not come to a meeting, or has called them off."""
        self.avoid(peer_id, offence=peer_id not in self._node.proven, late=True)
        self._node.proven.discard(peer_id)

    def _cancel(self, meeting: Meeting, reason: str) -> None:
        log.info("no meeting: %s", fields(partner=meeting.name, reason=reason, round=self._agreement.round + 1))
        self._agreement.cancel(meeting)
