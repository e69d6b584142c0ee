"""A peer that cannot be dialled keeps reservations at relays, its initial peers, and is reached through them.

A lost reservation (the relay has stopped, the connection broke) is renewed as soon as the relay answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from peer.logs import fields, get_logger
from peer.p2p.addresses import CIRCUIT, owner_of
from peer.p2p.reachability.relay import (
    PING_SECONDS,
    PONG_TIMEOUT,
    RELAY_PROTOCOL,
    REPLY,
    RESERVE_TIMEOUT,
    Full,
    Ping,
    Reserve,
)
from peer.p2p.stream import BadMessage, Open, Stream, StreamLost

log = get_logger("relay")

RELAYS = 3  # at once
PAUSE, LONGEST_PAUSE = 1.0, 20.0  # seconds between two tries


async def try_reservation(open_stream: Open, relay: str) -> None:
    """Make a reservation and end it; raises :class:`StreamLost`, :class:`BadMessage` or ``TimeoutError``."""
    stream = await open_stream(owner_of(relay), RELAY_PROTOCOL, [relay])
    try:
        await _reserve(stream)
    finally:
        stream.close()


class Reservations:
    """Belongs to the network thread. ``open_stream``: :meth:`peer.p2p.node.Node.open`."""

    def __init__(self, open_stream: Open, relays: Sequence[str]) -> None:
        """``relays``: addresses with ids; one of each id is used, and not more than :data:`RELAYS`."""
        self._open = open_stream
        self._relays = list({owner_of(address): address for address in reversed(relays)}.values())[::-1][:RELAYS]
        self._held: dict[str, None] = {}  # addresses of relays, oldest reservation first
        self._first = asyncio.Event()

    @property
    def places(self) -> list[str]:
        """Where others reach this peer, without its id."""
        return [f"{relay}{CIRCUIT}" for relay in self._held]

    def start(self, background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Keep reservations from now on."""
        for relay in self._relays:
            background(self._keep(relay))

    async def first(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for a reservation; is there one?"""
        try:
            await asyncio.wait_for(self._first.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def _keep(self, relay: str) -> None:
        pause, told = PAUSE, False
        while True:
            reason = await self._hold(relay)
            if relay in self._held:
                del self._held[relay]
                pause, told = PAUSE, False
            if not told:
                log.warning("no reservation at a relay, trying again: %s", fields(relay=relay, reason=reason))
                told = True
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LONGEST_PAUSE)

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
        self._held[relay] = None
        self._first.set()
        log.info("reached through a relay: %s", fields(relay=relay))
        number = 0
        while True:
            await stream.until_closed(PING_SECONDS)
            if stream.reader.at_eof():
                raise StreamLost("the stream ended")
            number += 1
            await stream.send(Ping(number=number), RESERVE_TIMEOUT)
            if (await stream.receive(Ping, PONG_TIMEOUT)).number != number:
                raise BadMessage("a ping came back with another number")


async def _reserve(stream: Stream) -> None:
    await stream.send(Reserve(), RESERVE_TIMEOUT)
    reply = await stream.receive(REPLY, RESERVE_TIMEOUT)
    if isinstance(reply, Full):
        raise StreamLost("all its reservations are taken")
