"""The one meeting that a peer has agreed on, watched until the boundary that it is for.

Previous station: proposing.py, which agrees on it. Next station: rendezvous.py, which keeps it.
"""

from __future__ import annotations

from peer.logs import fields, get_logger
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.swarm.context import SwarmContext
from peer.swarm.pairing.messages import READY, Accept, Meeting, Propose

log = get_logger("rendezvous")


class Appointment:
    """Belongs to the network thread. ``round`` ends at the boundary that the meeting is for."""

    def __init__(self, footing: SwarmContext) -> None:
        self._node, self._boundary = footing.node, footing.boundary
        self.round = 0
        self.meeting: Meeting | None = None

    def commit(self, stream: Stream, name: str, said: Propose | Accept) -> None:
        """Both sides have agreed; ``stream`` is the meeting from now on."""
        self.meeting = Meeting(stream, name, said.eta, said.root)
        self._node.background(self._listen(self.meeting))

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
                self.drop(meeting)

    def drop(self, meeting: Meeting) -> None:
        """It comes to nothing."""
        meeting.stream.close()
        meeting.settle(False)
        if self.meeting is meeting:
            self.meeting = None

    def pass_on(self) -> None:
        """The boundary is over; whoever was met has the stream now."""
        self.meeting = None
        self.round += 1
