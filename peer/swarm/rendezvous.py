"""Meeting a random partner without waiting for one.

During its inner steps a peer proposes to live members: those it has met longest ago first, at random among equals,
so weights mix faster (README, "Convergence"). Two peers whose boundaries are near each other commit to a meeting, and
the stream between them stays open: it *is* the meeting. At the boundary each side says ``Ready`` on it and the swap
runs over it. If the partner dies first it ends, which frees the other one at once. Who has no meeting asks around.

Whoever proposes first chooses, so each peer starts to propose at a random time of its inner phase. If all started
at their boundary, two peers that have just met would always find each other first, and never mix with the rest.

Each peer has at most one proposal in the air and one meeting; two proposals that cross are settled by the ids.
Previous station: members.py. Next station: exchange/pair.py, which gets the stream.
"""

from __future__ import annotations

import asyncio
import math
import random
import time

from peer.config import Rendezvous as Settings
from peer.grudges import SULK, Grudges
from peer.logs import fields, get_logger
from peer.progress import Progress, Stop
from peer.rounds import Group, Link
from peer.schedule import NOW, OPENS, PAUSE
from peer.streams import BadMessage, Stream, StreamLost
from peer.swarm.boundary import Boundary
from peer.swarm.latecomer import Beginning
from peer.swarm.meeting import (
    PROPOSAL,
    READY,
    REPLY,
    Accept,
    Decline,
    Meeting,
    Party,
    Propose,
    Ready,
    askable,
    near,
)
from peer.swarm.members import Members
from peer.swarm.node import OPEN_TIMEOUT, Node
from peer.swarm.records import MemberRecord

log = get_logger("rendezvous")

PROTOCOL = "noloco/meet/1"
ANSWER_TIMEOUT = 5.0  # seconds for a reply to a proposal
ASK_TIMEOUT = 3.0  # seconds for asking around at a boundary
SLACK = 2.0  # seconds that a partner may come late, on top of half the time it announced
PAUSE_SECONDS = (0.01, 0.3)  # between proposals, whatever the phase
AGAIN = 0.12  # inner phases before a member that has declined is asked again: boundaries have moved then


class Rendezvous:
    """Agrees on partners in the background; :meth:`group_for` is the loop's only call."""

    def __init__(
        self,
        node: Node,
        members: Members,
        progress: Progress,
        stop: Stop,
        settings: Settings,
        me: Party,
        beginning: Beginning,
    ) -> None:
        self._node, self._members, self._progress, self._stop = node, members, progress, stop
        self._settings, self._me, self._beginning = settings, me, beginning
        self._round = 0
        self._boundary = Boundary(progress)
        self._meeting: Meeting | None = None
        self._met: dict[str, int] = {}  # the round in which a partner was met last
        self._grudges = Grudges()
        self._asking = ""  # the peer that has our proposal at the moment
        self._answered = asyncio.Event()
        self._answered.set()

    # -- from the main thread

    def start(self, round: int) -> None:
        """Take proposals and make them, for the boundary that ends ``round``."""
        self._round = round
        self._node.call(self._node.serve(PROTOCOL, self._answer), OPEN_TIMEOUT)
        self._node.spawn(self._seek())

    def group_for(self, round: int) -> Group:
        """The partner that stands at this boundary too, or nobody. Never waits longer than was announced."""
        return self.group_beside(round, self._boundary.number, 0.0)

    def group_beside(self, round: int, phase: int, linger: float) -> Group:
        """The same for the boundary after inner phase number ``phase``, while the next one may be running already.

        A peer that loses nothing by waiting looks for a partner for ``linger`` seconds before it stays alone.
        """
        self._round = round
        patience = linger + 4 * (self._boundary.phase or 0.0) + 4 * (SLACK + ANSWER_TIMEOUT)
        return self._node.call(self._gather(phase, linger), patience)

    def avoid(self, peer_id: str) -> None:
        """What it sent could not be used: do not meet it for a while."""
        seconds = self._grudges.note(peer_id, SULK * (self._boundary.phase or 1.0), offence=True)
        log.warning("avoids a peer: %s", fields(peer=self._members.name_of(peer_id), seconds=seconds))

    # -- on the network thread: the boundary

    async def _gather(self, phase: int, linger: float) -> Group:
        until = time.monotonic() + linger
        try:
            with self._boundary.standing(phase):
                for _ in range(2):  # the agreed meeting, and one more try if it falls through
                    while self._meeting is None:
                        await self._ask_around()
                        if self._meeting is not None or self._stop.requested or time.monotonic() >= until:
                            break
                        await asyncio.sleep(self._pause())
                    if self._meeting is None:
                        break
                    link = await self._meet(self._meeting)
                    if link is not None:
                        self._met[link.peer_id] = self._round
                        return Group(self._round, (link,))
                return Group(self._round)
        finally:
            self._meeting = None
            self._round += 1

    async def _ask_around(self) -> None:
        """At the boundary with nobody to meet: whoever is ready."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                await self._answered.wait()  # the reply to our last proposal may be on its way
                for record in self._candidates()[: self._settings.tries]:
                    if self._meeting is not None or self._stop.requested:
                        return
                    await self._propose(record)
        except TimeoutError:
            log.info("nobody found: %s", fields(seconds=ASK_TIMEOUT, round=self._round))

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
        log.info("no meeting: %s", fields(partner=meeting.name, reason=reason, round=self._round))
        self._drop(meeting)
        return None

    # -- on the network thread: proposing

    async def _seek(self) -> None:
        asked: dict[str, float] = {}  # when
        round, opens = self._round, random.uniform(*OPENS)
        while not self._stop.requested:
            await asyncio.sleep(self._pause())
            if round != self._round:
                asked, round, opens = {}, self._round, random.uniform(*OPENS)
            if self._meeting is not None or self._boundary.here:
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
        if self._meeting is not None and not self._boundary.here:
            self._drop(self._meeting)  # before the checkpoint is written: the partner has time to find another one

    def _pause(self) -> float:
        """Seconds; short phases leave little time to find somebody."""
        least, most = PAUSE_SECONDS
        return min(max(random.uniform(*PAUSE) * (self._boundary.phase or math.inf), least), most)

    def _candidates(self) -> list[MemberRecord]:
        """Live members, those met longest ago first, in random order among equals: weights mix faster so."""
        live = [it for it in self._members.live() if not self._grudges.avoided(it.peer_id) and not self._late(it)]
        random.shuffle(live)
        return sorted(live, key=lambda record: self._met.get(record.peer_id, -1))

    def _late(self, other: MemberRecord | Propose) -> bool:
        return self._beginning.late(self._round, other.round, other.root)

    async def _propose(self, record: MemberRecord) -> None:
        if self._asking or self._meeting is not None:
            return
        self._asking = record.peer_id
        self._answered.clear()
        proposal = self._proposal()
        try:
            stream = await self._node.open(record.peer_id, PROTOCOL, record.addresses)
            try:
                await stream.send(proposal, ANSWER_TIMEOUT)
                self._consider(await stream.receive(REPLY, ANSWER_TIMEOUT), proposal, stream, record.name)
            finally:
                if self._meeting is None or self._meeting.stream is not stream:
                    stream.close()
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

    def _consider(self, reply: Accept | Decline, mine: Propose, stream: Stream, name: str) -> None:
        if isinstance(reply, Decline):
            if reply.run is not None:
                self._me.warn_of_difference(name, reply.run)
        elif self._meeting is None:
            window = NOW if self._boundary.here else self._settings.window  # at the boundary: whoever is ready
            if near(mine.eta, reply.eta, mine.phase, mine.phase, window):
                self._commit(stream, name, reply)

    def _proposal(self) -> Propose:
        return Propose(
            name=self._me.name,
            run=self._me.run,
            config=self._me.config,
            eta=self._boundary.eta() or 0.0,
            phase=self._boundary.phase or 0.0,
            round=self._round,
            root=self._beginning.root,
        )

    # -- on the network thread: answering

    async def _answer(self, stream: Stream) -> None:
        """Somebody proposes: commit or decline at once."""
        proposal = await stream.receive(PROPOSAL, ANSWER_TIMEOUT)
        decline = self._objection(proposal, stream.remote)
        if decline is not None:
            await stream.send(decline, ANSWER_TIMEOUT)
            await stream.until_closed(ANSWER_TIMEOUT)
            stream.close()
            return
        self._commit(stream, proposal.name, proposal)
        await stream.send(Accept(eta=self._boundary.eta() or 0.0, root=self._beginning.root), ANSWER_TIMEOUT)

    def _objection(self, proposal: Propose, remote: str) -> Decline | None:
        if proposal.run != self._me.run:
            return Decline(reason="another run")
        if proposal.config != self._me.config:
            return Decline(reason="another configuration", run=self._me.canonical)
        eta, phase = self._boundary.eta(), self._boundary.phase
        if self._stop.requested or eta is None or phase is None:
            return Decline(reason="not ready to meet")
        if self._meeting is not None:
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

    # -- on the network thread: meetings

    def _commit(self, stream: Stream, name: str, said: Propose | Accept) -> None:
        self._meeting = Meeting(stream, name, said.eta, said.root)
        self._node.background(self._listen(self._meeting))

    async def _listen(self, meeting: Meeting) -> None:
        """Wait for the partner's word. The stream may end instead, long before the boundary: then look again."""
        patience = 2 * max(meeting.eta, self._boundary.eta() or 0.0) + 30
        try:
            await meeting.stream.receive(READY, patience)
            meeting.settle(True)
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("meeting is off: %s", fields(partner=meeting.name, reason=str(error)))
            meeting.settle(False)
            if not self._boundary.here:
                self._drop(meeting)

    def _drop(self, meeting: Meeting) -> None:
        meeting.stream.close()
        meeting.settle(False)
        if self._meeting is meeting:
            self._meeting = None
