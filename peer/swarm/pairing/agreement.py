"""The messages by which two peers agree on a meeting, and the one meeting that a peer has agreed on.

proposer: Propose      other peer: Accept | Decline      at its boundary each side: PartnerReady
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.stream import BadMessage, Message, Stream, StreamLost
from peer.rounds.state import Root
from peer.rounds.types import Count, Name, Newest
from peer.swarm.context import Decline, Seconds, SwarmContext

log = get_logger("pairing")

KEPT_CALLED_OFF = 1000  # ids
# The stream of a meeting is read for so many times the time to the later boundary, and so many seconds more: the wait
# for the partner (may_be_late) ends before, so this bounds only a stream that nobody waits for.
MEETING_FACTOR, MEETING_SLACK = 2.0, 30.0


class Propose(Message):
    """Shall we meet at your next boundary and mine?"""

    kind: Literal["propose"] = "propose"
    name: Name  # what the proposer calls itself: nobody believes it
    round: Count
    eta: Seconds  # until the proposer's boundary
    phase: Seconds  # of the proposer's inner phase
    root: Root = ""
    run_ended: bool = False  # the proposer has made its last inner step


class Accept(Message):
    """Yes; both are committed now."""

    kind: Literal["accept"] = "accept"
    eta: Seconds
    root: Root = ""


class PartnerReady(Message):
    """I am at the boundary."""

    kind: Literal["ready"] = "ready"


PROPOSAL_ANSWER: TypeAdapter[Accept | Decline] = TypeAdapter(Annotated[Accept | Decline, Field(discriminator="kind")])


@dataclass(eq=False)
class Meeting:
    """A stream that both sides keep open until they are at their boundaries. ``came``: is the partner at its own?"""

    stream: Stream
    name: str
    eta: float  # seconds until the partner's boundary, as announced at ``agreed``
    own_eta: float  # until this peer's, as it announced
    root: str = ""
    agreed: float = field(default_factory=lambda: clock.monotonic())
    came: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def their_eta(self) -> float:
        """Seconds until the partner's boundary, as announced."""
        return max(0.0, self.eta - (clock.monotonic() - self.agreed))

    def own_wait(self) -> float:
        """Seconds until this peer's boundary, as it announced."""
        return self.own_eta - (clock.monotonic() - self.agreed)

    def resolve(self, came: bool) -> None:
        """The partner is ready, or the meeting is cancelled; the first call counts."""
        if not self.came.done():
            self.came.set_result(came)


class Agreement:
    """The meeting is for the boundary that ends ``round``. Belongs to the network thread, but for ``round``, which
    :meth:`Matchmaking.group_for` sets, and :meth:`called_off`, which any thread may ask.
    """

    def __init__(self, context: SwarmContext, leave_out: Callable[[str], None] = lambda _: None) -> None:
        """``leave_out``: gets the id of who calls off its meetings."""
        self._node, self._boundary, self._leave_out = context.node, context.boundary, leave_out
        self.round = 0
        self.meeting: Meeting | None = None
        # by id: for how many seconds, in all, meetings stood that it called off since it came to one or was left out
        self._held = Newest[float](KEPT_CALLED_OFF)
        self._called_off: set[str] = set()  # who has at this boundary

    def commit(self, stream: Stream, name: str, said: Propose | Accept, own_eta: float) -> None:
        """Both sides have agreed to meet over ``stream``. ``own_eta``: what this peer has told the other one."""
        self.meeting = Meeting(stream, name, said.eta, own_eta, said.root)
        self._node.background(self._listen(self.meeting))

    async def _listen(self, meeting: Meeting) -> None:
        """Wait until the partner is ready. If the stream ends before the boundary, this peer can find another one."""
        patience = MEETING_FACTOR * max(meeting.eta, self._boundary.eta() or 0.0) + MEETING_SLACK
        try:
            await meeting.stream.receive(PartnerReady, patience)
            meeting.resolve(True)
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("meeting is off: %s", fields(partner=meeting.name, reason=str(error)))
            if not meeting.came.done():  # else this peer has cancelled it
                self.note_called_off(meeting)
            meeting.resolve(False)
            if not self._boundary.here:
                self.cancel(meeting)

    def note_called_off(self, meeting: Meeting) -> None:
        """The partner has ended it. It is left out only when such meetings stood, in all, for more than an inner phase:
        its last swap may not have ended, it may have been killed, or it had agreed on another one when our answer came.
        """
        remote = meeting.stream.remote
        if self._boundary.here:
            self._called_off.add(remote)
        held = self._held.pop(remote, 0.0) + clock.monotonic() - meeting.agreed
        if held > (self._boundary.progress.phase_seconds or math.inf):
            self._leave_out(remote)
            return
        self._held[remote] = held

    def came(self, peer_id: str) -> None:
        """It has come to a meeting."""
        self._held.pop(peer_id, None)

    def called_off(self, peer_id: str) -> bool:
        """Has it called off a meeting at this boundary? Who ends its run does so, and may be met then."""
        return peer_id in self._called_off and not self._boundary.run_ended

    def cancel(self, meeting: Meeting) -> None:
        """End this meeting without a swap."""
        meeting.stream.close()
        meeting.resolve(False)
        if self.meeting is meeting:
            self.meeting = None

    async def drop(self, peer_id: str) -> None:
        """This peer avoids the other one from now on: a meeting that was agreed before is off."""
        if self.meeting is not None and self.meeting.stream.remote == peer_id:
            self.cancel(self.meeting)

    async def postpone(self) -> None:
        """The boundary comes a phase later: a meeting that was to be now is off, so that nobody waits for it."""
        if self.meeting is not None and self.meeting.own_wait() < self._boundary.progress.phase_seconds / 2:
            await self.call_off("our last swap has not ended")

    async def call_off(self, reason: str) -> None:
        """This peer does not come to its next meeting. The one whose partner it awaits at a boundary still stands."""
        if self.meeting is None or self._boundary.here:
            return
        log.info("no meeting: %s", fields(partner=self.meeting.name, reason=reason))
        self.cancel(self.meeting)

    async def end_run(self) -> None:
        """The last inner step is made: a meeting of before is off."""
        self._boundary.run_ended = True
        await self.call_off("has made its last inner step")

    async def end_swaps(self) -> None:
        """The last swap is made: who has proposed another one since is not left waiting."""
        self._boundary.swaps_ended = True
        await self.call_off("has made its last swap")

    def end_round(self) -> None:
        """The boundary is over; the exchange owns the stream from now on."""
        self.meeting = None
        self._called_off.clear()
        self.round += 1
