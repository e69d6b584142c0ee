"""Who has let this peer down, and how long it is left out for that. Pure but for the clock.

An id costs an attacker nothing, so the list is bounded and the oldest entries make room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

BACKOFF_PHASES = 4.0  # inner phases for which a peer is left out that sent what could not be used, the first time
KEPT = 1000  # ids
DOUBLINGS = 5  # how often the time doubles with every further offence
FORGIVEN = 3  # offences
MEMORY = 20.0  # an offence is forgotten after this many times the time that its author was left out


@dataclass
class Backoff:
    offence: bool
    strikes: int
    until: float
    forgotten: float


class PeerBackoff:
    """Times in seconds of ``clock``. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, Backoff] = {}
        self._writing = threading.Lock()

    def note(self, peer_id: str, seconds: float, *, offence: bool) -> float:
        """Leave it out from now on; returns for how long: ``seconds``, doubled for each offence before this one."""
        now = self._clock()
        with self._writing:
            before = self._held.get(peer_id)
            if before is not None and before.offence and before.until > now and not offence:
                return before.until - now  # silence does not make up for an offence
            self._held.pop(peer_id, None)
            strikes = before.strikes if before is not None and before.forgotten > now else 0
            strikes += offence
            length = seconds * 2 ** min(max(strikes - 1, 0), DOUBLINGS)
            while len(self._held) >= KEPT:
                self._held.pop(next(iter(self._held)))
            self._held[peer_id] = Backoff(offence, strikes, now + length, now + length * MEMORY)
        return length

    def forgive(self, peer_id: str) -> None:
        """It is another one now, or says so: a few times it is let in again at once."""
        with self._writing:
            held = self._held.get(peer_id)
            if held is not None and held.strikes <= FORGIVEN:
                held.until = self._clock()

    def avoided(self, peer_id: str) -> bool:
        """Is it left out now?"""
        held = self._held.get(peer_id)
        return held is not None and held.until > self._clock()

    def welcome(self, peer_id: str) -> bool:
        """It has come by itself: is it to be let in? Who only did not answer is, and nothing is left of that."""
        held = self._held.get(peer_id)
        if held is None or held.until <= self._clock():
            return True
        if not held.offence:
            held.until = 0.0
        return not held.offence
