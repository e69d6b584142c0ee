"""Streams of an invited swarm: each side sends its certificate first and checks the other's before it answers.

    caller: Pass, its first message     called: checks, then Pass and its answer     caller: checks

This adds no round trip. A stream may outlive the invitation by which it was let in, as a relay's reservation does: the
certificates of open streams are checked again and again (:meth:`Gate.look_again`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal
from weakref import WeakKeyDictionary

from pydantic import Field

from peer.logs import fields, get_logger
from peer.p2p.admission.invitation import Admission, Certificate
from peer.p2p.stream import MESSAGE_TIMEOUT, Message, Stream, StreamLost

log = get_logger("admission")

ADMISSION_PROTOCOL = "noloco/admission"
LOGGED_REFUSALS = 1000  # ids; each is logged once


class Pass(Message):
    """My certificate."""

    kind: Literal["pass"] = "pass"
    certificate: Certificate


class Knock(Message):
    """Would you admit me? From a peer that gets no answer from the DHT."""

    kind: Literal["knock"] = "knock"
    certificate: Certificate | None


class Notice(Message):
    """The swarm's owner, and the objection to the certificate."""

    kind: Literal["notice"] = "notice"
    owner: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$")]
    objection: Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]  # a part of one line


class Gate:
    """Belongs to the network thread."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._refused: set[str] = set()
        self._shown: WeakKeyDictionary[Stream, Certificate] = WeakKeyDictionary()  # on streams that were let in

    async def begin(self, stream: Stream) -> None:
        """The caller's side: send our certificate, and check the other's before the first read. Closes what fails."""
        stream.gate = self.check
        try:
            await self.show(stream)
        except BaseException:  # also when the caller is cancelled: nobody else knows this stream yet
            stream.close()
            raise

    async def show(self, stream: Stream) -> None:
        """Send our certificate."""
        await stream.send(Pass(certificate=self.admission.own), MESSAGE_TIMEOUT)

    async def check(self, stream: Stream) -> None:
        """Check the other side's certificate. Raises :class:`StreamLost` when it does not admit that peer."""
        shown = await stream.receive(Pass, MESSAGE_TIMEOUT)
        objection = self.admission.objection(shown.certificate, stream.remote)
        if objection:
            self._say(stream.remote, objection)
            raise StreamLost(objection)
        self._shown[stream] = shown.certificate

    def look_again(self, streams: Iterable[Stream]) -> None:
        """Close those of ``streams`` whose other side was let in and would not be now. This ends its reservation here,
        the circuits to it, and ours with it.
        """
        said = [(it.remote, self.admission.objection(shown, it.remote)) for it, shown in list(self._shown.items())]
        gone = {peer_id: objection for peer_id, objection in said if objection}
        for peer_id, objection in gone.items():
            self._say(peer_id, objection)
        for stream in [it for it in streams if it.remote in gone]:
            stream.close()

    def _say(self, peer_id: str, objection: str) -> None:
        if peer_id not in self._refused and len(self._refused) < LOGGED_REFUSALS:
            self._refused.add(peer_id)
            log.warning("turned away: %s", fields(peer=peer_id, reason=objection))

    async def answer(self, stream: Stream) -> None:
        """Handler of :data:`ADMISSION_PROTOCOL`, which is open to everybody."""
        asked = await stream.receive(Knock, MESSAGE_TIMEOUT)
        objection = "it asks for an invitation"
        if asked.certificate is not None:
            objection = self.admission.objection(asked.certificate, stream.remote)
        await stream.send_last(Notice(owner=self.admission.owner, objection=objection), MESSAGE_TIMEOUT)


def why_refused(address: str, notice: Notice, own: Certificate | None) -> str:
    """One line for a peer that was refused; empty when the invitation is valid."""
    if own is None:
        return (
            f"the swarm at {address} is for invited peers: set peer.invitation to the file that its owner gives you "
            f"(noloco-bootstrap invite), and in a configuration run.admission=invite and run.owner={notice.owner}"
        )
    if not notice.objection:
        return ""
    return f"not admitted at {address}: {notice.objection}; ask its owner for a new one (noloco-bootstrap invite)"
