"""A peer that cannot be dialled, or not from other networks, keeps reservations at relays and is reached through them.

Its initial peers come first, then members that others can dial. A relay that is full, silent or gone is replaced by
another one, and asked again after a pause. One through which nobody has called for long may join nobody: where there is
another one to ask, it is replaced too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any, NoReturn

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.addresses import CIRCUIT, is_of_private_network, most_public, owner_of, place_of, relay_of, tcp_of
from peer.p2p.reachability.relay import PING_SECONDS, PONG_TIMEOUT, RELAY_PROTOCOL, Granted, Ping, Reserve
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Open, Stream, StreamLost

log = get_logger("relay")

RELAYS = 3  # at once, of a peer that nobody can dial
PAUSE, LONGEST_PAUSE = 1.0, 20.0  # seconds between two tries of one relay
LONGEST_LOOK = 5.0  # seconds between two looks for one that may be asked
UNUSED_SECONDS = 600.0  # without a call through a relay, after which another one is asked before it
UNUSED = "nobody has called through it"


async def try_reservation(open_stream: Open, relay: str) -> None:
    """Make a reservation and end it; raises :class:`StreamLost`, :class:`BadMessage` or ``TimeoutError``."""
    with closing(await open_stream(owner_of(relay), RELAY_PROTOCOL, [relay])) as stream:
        await _reserve(stream)


class Reservations:
    """Belongs to the network thread. ``others``: addresses of further relays, as far as they are known now."""

    def __init__(self, open_stream: Open, relays: Sequence[str], others: Callable[[], Sequence[str]] = tuple) -> None:
        """``relays``: addresses with ids; the first of each id is used."""
        self._open, self._relays, self._others = open_stream, relays, others
        self._tasks: list[asyncio.Task[None]] = []  # of :meth:`_keep`
        self._asked: set[str] = set()  # ids of relays that hold a reservation, or are asked for one
        self._failed: dict[str, tuple[float, float]] = {}  # by id: when to ask again, and the pause before
        self._held: dict[str, str] = {}  # addresses of relays, and what others are told; oldest reservation first
        self._called: dict[str, float] = {}  # by the relay's id: when it was granted or others last called through it
        self._first = asyncio.Event()

    def called(self, origin: str) -> None:
        """Somebody has opened a stream to this peer from this multiaddr."""
        relay = relay_of(origin)
        if relay in self._called:
            self._called[relay] = clock.monotonic()

    @property
    def places(self) -> list[str]:
        """Where others reach this peer, without its id."""
        return [f"{relay}{CIRCUIT}" for relay in list(self._held.values())]

    def start(self, background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], count: int) -> None:
        """Keep ``count`` reservations from now on, if not more."""
        self._tasks += [background(self._keep()) for _ in range(count - len(self._tasks))]

    def stop(self) -> None:
        """Give all of them back."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._first.clear()

    async def first(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for a reservation; is there one?"""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first.wait(), timeout)
        return self._first.is_set()

    async def _keep(self) -> None:
        look = PAUSE
        while True:
            relay = self._choose()
            if relay is None:
                await asyncio.sleep(look * random.uniform(0.8, 1.2))
                look = min(2 * look, LONGEST_LOOK)
                continue
            look, owner = PAUSE, owner_of(relay)
            self._asked.add(owner)
            try:
                reason = await self._hold(relay)
            finally:
                self._asked.discard(owner)
                if relay in self._held:
                    del self._held[relay], self._called[owner]
                    self._failed.pop(owner, None)
            if owner not in self._failed:
                say = log.info if reason == UNUSED else log.warning
                say("no reservation at a relay, looking for another: %s", fields(relay=relay, reason=reason))
            earlier = LONGEST_PAUSE if reason == UNUSED else self._failed.get(owner, (0.0, PAUSE / 2))[1]
            pause = min(2 * earlier, LONGEST_PAUSE)
            self._failed[owner] = clock.monotonic() + pause * random.uniform(0.8, 1.2), pause

    def _choose(self) -> str | None:
        """The next relay to ask: the first of the initial peers that is free, or else any other."""
        others, now = list(self._others()), clock.monotonic()
        random.shuffle(others)
        others.sort(key=is_of_private_network)  # it may be another one than ours
        known: dict[str, str] = {}
        for address in (*self._relays, *others):
            known.setdefault(owner_of(address), address)
        self._failed = {owner: it for owner, it in self._failed.items() if owner in known}
        due = (it for it in known if it not in self._asked and self._failed.get(it, (0.0,))[0] <= now)
        return next((known[owner] for owner in due), None)

    def _told(self, relay: str, origin: str) -> str:
        """A numeric address of the relay, where one is known: its name may mean nothing in other networks.

        ``origin``: where the connection to it leads.
        """
        owner = owner_of(relay)
        known = [relay, *(it for it in self._relays if owner_of(it) == owner), f"{place_of(origin)}/p2p/{owner}"]
        return most_public([it for it in known if tcp_of(it) is not None] or [relay])

    async def _hold(self, relay: str) -> str:
        """Make a reservation and hold it; returns why it ended."""
        try:
            stream = await self._open(owner_of(relay), RELAY_PROTOCOL, [relay])
        except (StreamLost, TimeoutError) as error:
            return str(error) or "does not answer"
        try:
            await self._hold_on(stream, relay)
        except TimeoutError:
            stream.hang_up()
            return "does not answer any more"
        except (StreamLost, BadMessage) as error:
            return str(error) or "the stream ended"
        finally:
            stream.close()

    async def _hold_on(self, stream: Stream, relay: str) -> NoReturn:
        await _reserve(stream)
        owner = owner_of(relay)
        self._held[relay], self._called[owner] = self._told(relay, stream.origin), clock.monotonic()
        self._first.set()
        log.info("reached through a relay: %s", fields(relay=relay))
        number = 0
        while True:
            await stream.until_closed(PING_SECONDS)
            if stream.reader.at_eof():
                raise StreamLost("the stream ended")
            number += 1
            await stream.send(Ping(number=number), MESSAGE_TIMEOUT)
            if (await stream.receive(Ping, PONG_TIMEOUT)).number != number:
                raise BadMessage("a ping came back with another number")
            unused = clock.monotonic() - self._called[owner] > UNUSED_SECONDS
            if unused and len(self._held) > 1 and self._choose() is not None:
                raise StreamLost(UNUSED)


async def _reserve(stream: Stream) -> None:
    await stream.send(Reserve(), MESSAGE_TIMEOUT)
    await stream.receive(Granted, MESSAGE_TIMEOUT)
