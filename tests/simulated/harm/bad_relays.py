"""Members that are honest but for what they do as relays of peers behind a NAT."""

from __future__ import annotations

import asyncio

from peer.p2p.reachability.relay import FULL, RESERVATION_SILENCE, Granted, Ping, Reserve
from peer.p2p.stream import MESSAGE_TIMEOUT, Stream

RELAY_LIES = ("refuses", "mute", "slow", "joins nobody")
LATE = 4.0  # seconds until a slow one answers: just in time


async def hold(lie: str, stream: Stream) -> None:
    """In place of :meth:`peer.p2p.reachability.relay.Relay.hold`, so it has no reservation to join anybody by."""
    try:
        await stream.receive(Reserve, MESSAGE_TIMEOUT)
        if lie == "mute":
            await stream.until_closed(RESERVATION_SILENCE)
            return
        if lie == "refuses":
            await stream.send_last(FULL, MESSAGE_TIMEOUT)
            return
        await asyncio.sleep(LATE if lie == "slow" else 0.0)
        await stream.send(Granted(), MESSAGE_TIMEOUT)
        if lie == "slow":  # so slow that it answers no ping
            await stream.until_closed(RESERVATION_SILENCE)
            return
        while True:
            await stream.send(await stream.receive(Ping, RESERVATION_SILENCE), MESSAGE_TIMEOUT)
    finally:
        stream.close()
