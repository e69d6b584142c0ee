"""Which peers failed this peer, and for how long it leaves them out; which did well last. Pure but for the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from peer import clock
from peer.rounds.types import Newest

# Inner phases for which a peer is left out after its first offence. So it spoils at most one round in five, and one
# that only had a bad line is met again after a few rounds.
BACKOFF_PHASES = 4.0
KEPT = 1000  # ids
PROVEN = 256  # ids
DOUBLINGS = 5  # the time doubles with each further offence, at most this often
FORGIVEN = 3  # offences; after more of them a swap that succeeds does not end the backoff
MEMORY = 20.0  # an offence is forgotten after this many times its backoff


@dataclass
class Backoff:
    firm: bool  # the peer's calls do not end it: it is for an offence, or the peer is refused
    strikes: int
    until: float
    forgotten: float


class PeerBackoff:
    """Times in seconds of ``now``. From any thread."""

    def __init__(self, now: Callable[[], float] = lambda: clock.monotonic()) -> None:
        self._now = now
        self._held = Newest[Backoff](KEPT)
        self._writing = threading.Lock()

    def note(self, peer_id: str, seconds: float, *, offence: bool, refused: bool = False) -> float:
        """Leave the peer out from now on, for ``seconds``, doubled for each earlier offence; returns how long.

        ``refused``: its calls do not end that, though it was no offence.
        """
        now = self._now()
        with self._writing:
            before = self._held.get(peer_id)
            if before is not None and before.firm and before.until > now and not offence:
                return before.until - now  # a timeout does not shorten a firm backoff
            strikes = before.strikes if before is not None and before.forgotten > now else 0
            strikes += offence
            length = seconds * 2 ** min(max(strikes - 1, 0), DOUBLINGS)
            self._held[peer_id] = Backoff(offence or refused, strikes, now + length, now + length * MEMORY)
        return length

    def forgive(self, peer_id: str) -> None:
        """A swap with the peer has succeeded, or it has another state: after few offences its backoff ends at once."""
        with self._writing:
            held = self._held.get(peer_id)
            if held is not None and held.strikes <= FORGIVEN:
                held.until = self._now()

    def knows(self, peer_id: str) -> bool:
        """Has the peer failed before, and it is not forgotten?"""
        held = self._held.get(peer_id)
        return held is not None and self._now() < held.forgotten

    def remembers(self, peer_id: str) -> bool:
        """Has the peer failed before, is no longer left out for it, and it is not forgotten?"""
        return self.knows(peer_id) and not self.avoided(peer_id)

    def avoided(self, peer_id: str) -> bool:
        """Is the peer left out now?"""
        held = self._held.get(peer_id)
        return held is not None and held.until > self._now()

    def welcome(self, peer_id: str) -> bool:
        """May a peer that calls by itself come in? Its call ends a backoff that is not firm, as that of a timeout."""
        held = self._held.get(peer_id)
        if held is not None and not held.firm:
            held.until = 0.0
        return not self.avoided(peer_id)


class Proven:
    """The ids with which a swap has succeeded last."""

    def __init__(self) -> None:
        self._ids = Newest[None](PROVEN)

    def add(self, peer_id: str) -> None:
        """A swap with it has succeeded."""
        self._ids[peer_id] = None

    def discard(self, peer_id: str) -> None:
        """It has failed this peer."""
        self._ids.pop(peer_id, None)

    def newest_first(self) -> list[str]:
        return [*reversed(self._ids)]

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._ids
