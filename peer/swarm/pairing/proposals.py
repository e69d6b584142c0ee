"""Asking members for a meeting, and answering those who ask.

Each peer has at most one proposal in the air and one meeting; two proposals that cross are settled by the ids.
Previous stations: members.py, meeting.py. Next station: appointment.py.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterable

from peer.config.schema import RendezvousConfig
from peer.logs import fields, get_logger
from peer.p2p.stream import BadMessage, Refused, Stream, StreamLost
from peer.rounds.backoff import BACKOFF_PHASES, PeerBackoff
from peer.rounds.pairing_rule import AT_BOUNDARY, NEVER, OPENS, PROPOSAL_PAUSE, askable, in_order, near
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import MemberRecord
from peer.swarm.healing.late_join import Beginning
from peer.swarm.messages import Decline
from peer.swarm.pairing.agreement import Appointment
from peer.swarm.pairing.messages import PROPOSAL, REPLY, Accept, Propose

log = get_logger("rendezvous")

PROTOCOL = "noloco/meet/2"
ANSWER_TIMEOUT = 5.0  # seconds for a reply to a proposal
ASK_TIMEOUT = 3.0  # seconds for asking around at a boundary
PAUSE_SECONDS = (0.01, 0.3)  # between proposals, whatever the phase
AGAIN = 0.12  # inner phases before a member that has declined is asked again: boundaries have moved then


class Proposing:
    """Ends in an :class:`Appointment`. Belongs to the network thread, but for :meth:`avoid` and :meth:`forgive`."""

    def __init__(
        self, footing: SwarmContext, settings: RendezvousConfig, beginning: Beginning, agreed: Appointment
    ) -> None:
        self._node, self._members, self._boundary = footing.node, footing.members, footing.boundary
        self._stop, self._me = footing.stop, footing.node.member
        self._settings, self._beginning, self._agreed = settings, beginning, agreed
        self._met: dict[str, int] = {}  # the round in which a partner was met last
        self._grudges = PeerBackoff()
        self._asking = ""  # the peer that has our proposal at the moment
        self._answered = asyncio.Event()
        self._answered.set()

    def met(self, peer_id: str) -> None:
        """It was met at this boundary: others come first now."""
        self._met[peer_id] = self._agreed.round

    def avoid(self, peer_id: str) -> None:
        """What it sent could not be used: do not meet it for a while."""
        seconds = self._grudges.note(peer_id, BACKOFF_PHASES * (self._boundary.phase or 1.0), offence=True)
        log.warning("avoids a peer: %s", fields(peer=self._members.name_of(peer_id), seconds=seconds))

    def forgive(self, peers: Iterable[str]) -> None:
        """Their weights have something in common with ours by now."""
        for peer_id in peers:
            self._grudges.forgive(peer_id)

    def pause(self) -> float:
        """Seconds between two proposals; short phases leave little time to find somebody."""
        least, most = PAUSE_SECONDS
        return min(max(random.uniform(*PROPOSAL_PAUSE) * (self._boundary.phase or math.inf), least), most)

    # -- asking

    async def seek(self) -> None:
        """While the inner steps run: propose to those whose boundary is near, from a random time of the phase on."""
        agreed = self._agreed
        asked: dict[str, float] = {}  # when
        round, opens = agreed.round, random.uniform(*OPENS)
        while not self._stop.requested:
            await asyncio.sleep(self.pause())
            if round != agreed.round:
                asked, round, opens = {}, agreed.round, random.uniform(*OPENS)
            if agreed.meeting is not None or self._boundary.here:
                continue
            eta, phase = self._boundary.eta(), self._boundary.phase
            if eta is None or not phase:
                continue
            before = time.monotonic() - AGAIN * phase
            due = askable(self._candidates(), eta / phase, opens)
            candidate = next((it for it in due if asked.get(it.peer_id, -math.inf) < before), None)
            if candidate is not None:
                asked[candidate.peer_id] = time.monotonic()
                await self._propose(candidate)
        if agreed.meeting is not None and not self._boundary.here:
            agreed.drop(agreed.meeting)  # before the checkpoint is written: the partner has time to find another one

    async def ask_around(self) -> None:
        """At the boundary with nobody to meet: whoever is ready."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                await self._answered.wait()  # the reply to our last proposal may be on its way
                for record in self._candidates()[: self._settings.tries]:
                    if self._agreed.meeting is not None or self._stop.requested:
                        return
                    await self._propose(record)
        except TimeoutError:
            log.info("nobody found: %s", fields(seconds=ASK_TIMEOUT, round=self._agreed.round))

    def _candidates(self) -> list[MemberRecord]:
        """Live members in the order in which they are asked."""
        live = [it for it in self._members.live() if not self._grudges.avoided(it.peer_id) and not self._late(it)]
        return in_order(live, lambda record: self._met.get(record.peer_id, NEVER))

    def _late(self, other: MemberRecord | Propose) -> bool:
        return self._beginning.late(self._agreed.round, other.round, other.root)

    async def _propose(self, record: MemberRecord) -> None:
        if self._asking or self._agreed.meeting is not None:
            return
        self._asking = record.peer_id
        self._answered.clear()
        proposal = self._proposal()
        try:
            stream = await self._node.open_to_member(record.peer_id, PROTOCOL, record.addresses)
            try:
                await stream.send(proposal, ANSWER_TIMEOUT)
                self._consider(await stream.receive(REPLY, ANSWER_TIMEOUT), proposal, stream, record.name)
            finally:
                if self._agreed.meeting is None or self._agreed.meeting.stream is not stream:
                    stream.close()
        except Refused as error:
            self._me.warn_of(record.name, error)
        except (TimeoutError, StreamLost) as error:
            log.debug("no answer: %s", fields(peer=record.name, reason=str(error)))
            self._members.forget(record.peer_id)
            if isinstance(error, TimeoutError):
                self._node.hang_up(record.peer_id)
        except BadMessage as error:
            log.warning("strange answer: %s", fields(peer=record.name, reason=str(error)))
        finally:
            self._asking = ""
            self._answered.set()

    def _proposal(self) -> Propose:
        return Propose(
            name=self._me.name,
            eta=self._boundary.eta() or 0.0,
            phase=self._boundary.phase or 0.0,
            round=self._agreed.round,
            root=self._beginning.root,
        )

    def _consider(self, reply: Accept | Decline, mine: Propose, stream: Stream, name: str) -> None:
        if isinstance(reply, Accept) and self._agreed.meeting is None:
            window = AT_BOUNDARY if self._boundary.here else self._settings.window  # at the boundary: whoever is ready
            if near(mine.eta, reply.eta, mine.phase, mine.phase, window):
                self._agreed.commit(stream, name, reply)

    # -- answering

    async def answer(self, stream: Stream) -> None:
        """Somebody proposes: commit or decline at once."""
        proposal = await stream.receive(PROPOSAL, ANSWER_TIMEOUT)
        decline = self._objection(proposal, stream.remote)
        if decline is not None:
            await stream.send(decline, ANSWER_TIMEOUT)
            await stream.until_closed(ANSWER_TIMEOUT)
            stream.close()
            return
        self._agreed.commit(stream, proposal.name, proposal)
        await stream.send(Accept(eta=self._boundary.eta() or 0.0, root=self._beginning.root), ANSWER_TIMEOUT)

    def _objection(self, proposal: Propose, remote: str) -> Decline | None:
        eta, phase = self._boundary.eta(), self._boundary.phase
        if self._stop.requested or eta is None or phase is None:
            return Decline(reason="not ready to meet")
        if self._agreed.meeting is not None:
            return Decline(reason="has a meeting")
        if self._late(proposal):
            return Decline(reason="takes the weights of others first")
        if self._grudges.avoided(remote):
            return Decline(reason="sent what could not be used")
        if self._asking and not (self._asking == remote and self._node.peer_id > remote):
            return Decline(reason="is asking somebody")
        if not near(eta, proposal.eta, phase, proposal.phase, self._settings.window):
            return Decline(reason="boundaries too far apart")
        return None
