"""When a peer pauses: requests of ``noloco-peer pause`` and ``resume``, and ``peer.hours``.

The command writes a request into the peer's folder, and the peer takes it from there within a second. What a person
says holds until the next border of the hours, or for ever without hours; a new process begins without any request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from peer import clock
from peer.config.fields import Hours, minutes_of
from peer.config.files import replacing
from peer.logs import get_logger
from peer.process import Pause

log = get_logger("pause")

Request = Literal["pause", "resume"]
REQUEST = ".request"  # in the peer's folder
REQUEST_PERIOD = 0.25  # between two looks for a request


class PauseRule:
    """Decides whether the peer is paused. ``hours``: those in which it trains; ``None``: always. Pure."""

    def __init__(self, hours: Hours | None) -> None:
        self._begin, self._end = minutes_of(hours) if hours else (0, 0)
        self._by_hand: bool | None = None  # paused, as a person has said since the last border
        self._outside: bool | None = None

    def paused(self, minute: int, request: Request | None) -> bool:
        """At this ``minute`` of the local day, with the newest ``request`` since the last call."""
        since, length = (minute - self._begin) % 1440, (self._end - self._begin) % 1440
        outside = length > 0 and since >= length
        if outside != self._outside:
            self._outside, self._by_hand = outside, None
        if request is not None:
            self._by_hand = request == "pause"
        return outside if self._by_hand is None else self._by_hand


@contextlib.contextmanager
def watching(folder: Path, hours: Hours | None, pause: Pause) -> Iterator[None]:
    """Within the context ``pause`` is what requests in ``folder`` and the hours say. The folder is this peer's own."""
    take(folder)
    rule, ended = PauseRule(hours), clock.event()

    def look() -> None:
        now = datetime.fromtimestamp(clock.unix())
        paused = rule.paused(60 * now.hour + now.minute, take(folder))
        if paused != pause.requested:
            pause.requested = paused
            log.info("asked to pause" if paused else "asked to resume")

    def watch() -> None:
        while not ended.wait(REQUEST_PERIOD):
            look()

    if hours:  # in a container it is UTC, whatever the machine has
        zone = datetime.fromtimestamp(clock.unix()).astimezone()
        log.info("trains in peer.hours %s, by the clock of the zone %s (UTC%s)", hours, f"{zone:%Z}", f"{zone:%z}")
    look()
    with clock.worker("pause") as worker:
        try:  # a signal's exception may come while it begins
            worker.submit(watch)
            yield
        finally:
            ended.set()


def take(folder: Path) -> Request | None:
    """The request in the folder of a peer, which is removed."""
    taken = folder / f"{REQUEST}.taken"
    try:
        (folder / REQUEST).rename(taken)  # another one may come meanwhile
        with taken.open("rb") as opened:
            text = opened.read(16).decode("ascii", "replace")
        taken.unlink()
    except OSError:
        return None
    return next((it for it in get_args(Request) if it == text), None)


def ask(folder: Path, request: Request, seconds: float) -> bool:
    """Put ``request`` into the folder of a peer; returns whether the peer has taken it within ``seconds``.

    Raises ``OSError`` when the folder cannot be written.
    """
    file = folder / REQUEST
    with replacing(file) as new:
        new.write_text(request, encoding="ascii")
        new.chmod(0o644)  # no secret; the peer of another user must read what root has written, with any umask
    for _ in range(round(seconds / REQUEST_PERIOD)):
        clock.sleep(REQUEST_PERIOD)
        if not file.exists():
            return True
    file.unlink(missing_ok=True)
    return False
