"""Proposes meetings to members and answers their proposals.

A peer has at most one open proposal and one meeting. While its proposal is open it may accept another one; then it
closes the stream of a later answer. If two peers propose to each other, the ids decide.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping

from peer import clock
from peer.config.schema import RendezvousConfig
from peer.logs import fields, get_logger
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Refused, Stream, StreamLost
from peer.rounds.backoff import BACKOFF_PHASES
from peer.rounds.pairing_rule import AT_BOUNDARY, LAST_CALL, OPENS, PROPOSAL_PAUSE, askable, ends_soon, near
from peer.swarm.context import Decline, SwarmContext
from peer.swarm.directory.records import LIFETIME, MemberRecord
from peer.swarm.healing import Origin, Position
from peer.swarm.pairing.agreement import PROPOSAL_ANSWER, Accept, Agreement, Propose
from peer.swarm.pairing.candidate_order import CandidateOrder

log = get_logger("pairing")

MEET_PROTOCOL = "noloco/meet"
ASK_TIMEOUT = 3.0  # seconds for proposals at a boundary
PAUSE_SECONDS = (0.01, 0.3)  # between two looks or proposals, whatever the phase
QUIET_SECONDS = 1.0  # between two looks while there is nothing to propose: a request to stop or pause has no event
# If the peer that is asked has not answered by then, its own proposal is accepted; one that declines later counts as
# silent, unless our own swap fills the line.
ANSWER_SECONDS = 1.0
ANSWER_PHASES = 0.5  # inner phases after which an answer is of no use
ASK_AGAIN_PHASES = 0.12  # inner phases until a member that has declined is asked again
SWAPS_ENDED = "has made its last swap"  # why it declines: it is not asked again


class Proposals:
    """Leads to an :class:`Agreement`. Belongs to the network thread; :meth:`count` only reads, from any thread."""

    def __init__(self, context: SwarmContext, settings: RendezvousConfig, origin: Origin, agreement: Agreement) -> None:
        self._context, self._settings, self._origin, self._agreement = context, settings, origin, agreement
        self._node, self._members, self._boundary = context.node, context.members, context.boundary
        self._order = CandidateOrder(agreement)
        self._met_at_end: set[str] = set()  # met since the last inner step, or without a further swap
        self._asking = ""  # the peer that has our open proposal
        self._answered = asyncio.Event()
        self._answered.set()

    def met(self, peer_id: str) -> None:
        self._order.met(peer_id)
        if self._boundary.run_ended:
            self._met_at_end.add(peer_id)

    def pause(self) -> float:
        """Seconds between two proposals; short phases leave little time to find a partner."""
        (least, most), phase_seconds = PAUSE_SECONDS, self._boundary.progress.phase_seconds or math.inf
        return min(max(random.uniform(*PROPOSAL_PAUSE) * phase_seconds, least), most)

    # -- asking

    async def seek(self) -> None:
        """During the inner steps: propose to members with a near boundary, from a random time of the phase on."""
        agreement = self._agreement
        round, opens = agreement.round, random.uniform(*OPENS)
        while True:
            if self._context.away and agreement.meeting is not None and not self._boundary.here:
                agreement.cancel(agreement.meeting)  # before the checkpoint: the partner can find another one
            if self._context.stopping:
                return
            await self._sleep(opens)
            if round != agreement.round:
                self._order.end_round(round)
                round, opens = agreement.round, random.uniform(*OPENS)
            if agreement.meeting is not None or self._boundary.here or self._context.away:
                continue
            eta, phase_seconds = self._boundary.eta(), self._boundary.progress.phase_seconds
            if eta is None or not phase_seconds or eta / phase_seconds > max(opens, LAST_CALL):
                continue
            candidates = askable(self._candidates(), eta / phase_seconds, opens)
            candidate = min(candidates, key=self._last_asked, default=None)
            again = clock.monotonic() - ASK_AGAIN_PHASES * phase_seconds
            if candidate is not None and self._last_asked(candidate) < again:
                await self._propose(candidate)

    async def _sleep(self, opens: float) -> None:
        """A pause. It is longer while this peer has a meeting, or is far from the time from which it asks others."""
        meeting, eta = self._agreement.meeting, self._boundary.eta()
        phase_seconds = self._boundary.progress.phase_seconds
        idle = QUIET_SECONDS if self._context.away else 0.0
        if not idle and eta is not None and phase_seconds:
            idle = eta if meeting is not None else (eta - max(opens, LAST_CALL) * phase_seconds) / 2
        seconds = max(self.pause(), min(idle, QUIET_SECONDS))
        if meeting is not None and not meeting.came.done():
            await asyncio.wait([meeting.came], timeout=seconds)  # it may be cancelled
        else:
            await asyncio.sleep(seconds)

    async def ask_around(self) -> None:
        """At the boundary without a meeting: propose to one member after the other."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                await self._answered.wait()  # our last proposal may still be open
                candidates = sorted(self._candidates(), key=self._last_asked)
                for record in candidates[: self._settings.tries]:
                    if self._agreement.meeting is not None or self._context.away:
                        return
                    await self._propose(record)
        except TimeoutError:
            log.info("no partner found: %s", fields(seconds=ASK_TIMEOUT, round=self._agreement.round + 1))

    def count(self) -> int:
        """Members to ask."""
        return sum(self._may_be_met(it) for it in self._context.candidates())

    def _may_be_met(self, record: MemberRecord) -> bool:
        if self._context.backoff.avoided(record.peer_id) or self._agreement.called_off(record.peer_id):
            return False
        if not self._boundary.run_ended:
            return True
        left = max(0, self._context.counters.boundary_step - record.step) * self._context.tokens_per_step()
        soon = ends_soon(left, self._context.rate_of(record), LIFETIME, self._boundary.end_patience)
        return soon and record.peer_id not in self._met_at_end

    def _just_met(self, peer_id: str) -> bool:
        """The run has ended with a swap with this peer, and others may be met: another one would change little."""
        if not self._boundary.run_ended or self._order.met_in(peer_id) != self._agreement.round - 1:
            return False
        return any(it.peer_id != peer_id and self._may_be_met(it) for it in self._context.candidates())

    def _candidates(self) -> list[MemberRecord]:
        """Live members that may be met, in the order in which they are asked."""
        members = self._context.candidates()
        live = {it.peer_id: it for it in members if self._may_be_met(it) and not self._just_met(it.peer_id)}
        ahead = self._ahead(live)
        return self._order.of([it for key, it in live.items() if key not in ahead])

    def _last_asked(self, record: MemberRecord) -> float:
        return self._order.asked_at(record.peer_id)

    def _ahead(self, others: Mapping[str, Position]) -> set[str]:
        """Ids of those among ``others`` whose weights this peer takes before it meets them (healing.py).

        It takes weights only when most are ahead, as far as it knows. If it declined the others all the same, a fast
        peer that began apart from its swarm would stay alone for ever.
        """
        round, known = self._agreement.round, {it.peer_id: it for it in self._context.others()}
        if not self._origin.late_to(round, [*{**known, **others}.values()]):
            return set()
        return {key for key, it in others.items() if self._origin.late(round, it.round, it.root)}

    async def _propose(self, record: MemberRecord) -> None:
        if self._asking or self._agreement.meeting is not None:
            return
        self._asking = record.peer_id
        self._order.asks(record.peer_id)
        self._answered.clear()
        proposal = Propose(
            name=self._node.member.name,
            eta=self._boundary.eta() or 0.0,
            phase=self._boundary.progress.phase_seconds,
            round=self._agreement.round,
            root=self._origin.root,
            run_ended=self._boundary.run_ended,
        )
        try:
            async with asyncio.timeout(max(ASK_TIMEOUT, ANSWER_PHASES * (proposal.phase or math.inf))):
                await self._ask(record, proposal)
        except (Refused, BadMessage) as error:
            if isinstance(error, Refused):
                self._node.member.warn_of(record.name, error)
            else:
                log.warning("invalid answer: %s", fields(peer=record.name, reason=str(error)))
            self._context.backoff.note(record.peer_id, BACKOFF_PHASES * (proposal.phase or 1.0), offence=True)
            await self._agreement.drop(record.peer_id)  # it may have proposed one meanwhile
        except (TimeoutError, StreamLost) as error:
            log.debug("no answer: %s", fields(peer=record.name, reason=str(error)))
            self._order.note_silence(record.peer_id, silent=isinstance(error, TimeoutError))
            if isinstance(error, TimeoutError):
                if self._node.hears(record.peer_id):  # the answer waits behind a swap: asked last, and not given up
                    return
                self._node.hang_up(record.peer_id)
            self._members.forget(record.peer_id)
        finally:
            self._asking = ""
            self._answered.set()

    async def _ask(self, record: MemberRecord, proposal: Propose) -> None:
        stream = await self._node.open_to_member(record.peer_id, MEET_PROTOCOL, record.addresses)
        began = clock.monotonic()
        try:
            await stream.send(proposal, MESSAGE_TIMEOUT)
            self._consider(await stream.receive(PROPOSAL_ANSWER, MESSAGE_TIMEOUT), proposal, stream, record.name)
        finally:
            if self._agreement.meeting is None or self._agreement.meeting.stream is not stream:
                stream.close()
                if clock.monotonic() - began > ANSWER_SECONDS and not self._boundary.progress.swapping:
                    self._order.note_silence(record.peer_id)

    def _consider(self, reply: Accept | Decline, mine: Propose, stream: Stream, name: str) -> None:
        avoided = self._context.backoff.avoided(stream.remote)  # since it was asked, a swap with it may have ended
        free = self._agreement.meeting is None and not self._context.away
        late = mine.run_ended is not self._boundary.run_ended or self._boundary.eta() is None  # another state comes
        if isinstance(reply, Decline) and reply.reason == SWAPS_ENDED:
            self._met_at_end.add(stream.remote)
        if isinstance(reply, Accept) and free and not (avoided or late):
            window = AT_BOUNDARY if self._boundary.here else self._settings.window
            if near(mine.eta, reply.eta, mine.phase, mine.phase, window):
                now = clock.monotonic()
                waited = now - self._order.asked_at(stream.remote, otherwise=now)
                self._agreement.commit(stream, name, reply, mine.eta - waited)

    # -- answering

    async def answer(self, stream: Stream) -> None:
        """Commit to a peer's proposal or decline it at once."""
        proposal = await stream.receive(Propose, MESSAGE_TIMEOUT)
        self._order.answers(stream.remote)
        decline = self._objection(proposal, stream.remote)
        if decline is not None:
            await stream.send_last(decline, MESSAGE_TIMEOUT)
            return
        accepted = Accept(eta=self._boundary.eta() or 0.0, root=self._origin.root)
        name = self._members.name_of(stream.remote, proposal.name)
        self._agreement.commit(stream, name, proposal, accepted.eta)
        await stream.send(accepted, MESSAGE_TIMEOUT)

    def _objection(self, proposal: Propose, remote: str) -> Decline | None:
        eta, phase_seconds = self._boundary.eta(), self._boundary.progress.phase_seconds
        if self._boundary.swaps_ended:
            return Decline(reason=SWAPS_ENDED)
        if self._context.away or eta is None or not phase_seconds:
            return Decline(reason="not ready to meet")
        if self._agreement.meeting is not None:
            return Decline(reason="has a meeting")
        if proposal.run_ended is not self._boundary.run_ended or remote in self._met_at_end or self._just_met(remote):
            return Decline(reason="only one of us has ended its run, or we have met since")
        if self._ahead({remote: proposal}):
            return Decline(reason="takes the weights of others first")
        if self._context.backoff.avoided(remote) or self._agreement.called_off(remote):
            return Decline(reason="sent what could not be used, or did not come")
        fresh = self._asking == remote and clock.monotonic() - self._order.asked_at(remote) < ANSWER_SECONDS
        if fresh and self._node.peer_id < remote:
            return Decline(reason="has an open proposal")
        if not near(eta, proposal.eta, phase_seconds, proposal.phase, self._settings.window):
            return Decline(reason="boundaries too far apart")
        others = sum(it.peer_id != remote and self._may_be_met(it) for it in self._context.candidates())
        if eta > LAST_CALL * phase_seconds and self._order.met_often(remote, others):
            return Decline(reason="meets others first")
        return None
