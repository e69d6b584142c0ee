"""The messages of libp2p's circuit relay v2 that a relay needs, as bytes.

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md: length-delimited protobuf.
"""

from __future__ import annotations

import asyncio

from peer.p2p.identity import LONGEST_ID
from peer.p2p.protobuf import BYTES_FIELD, INT_FIELD, ONE, delimited, message_classes, read_delimited
from peer.p2p.stream import BadMessage

HOP = "/libp2p/circuit/relay/0.2.0/hop"  # the caller to the relay
STOP = "/libp2p/circuit/relay/0.2.0/stop"  # the relay to the called
CONNECT, STATUS = 1, 2  # kinds of a hop message
STOP_CONNECT, STOP_STATUS = 0, 1  # kinds of a stop message
OK, RESERVATION_REFUSED, LIMIT_EXCEEDED, CONNECTION_FAILED, NO_RESERVATION = 100, 200, 201, 203, 204
CAP = 4096  # bytes of a message

CIRCUIT_MESSAGES = message_classes(
    "circuit",
    {
        "Peer": [("id", 1, BYTES_FIELD, ONE)],
        "HopMessage": [("type", 1, INT_FIELD, ONE), ("peer", 2, "Peer", ONE), ("status", 5, INT_FIELD, ONE)],
        "StopMessage": [("type", 1, INT_FIELD, ONE), ("peer", 2, "Peer", ONE), ("status", 4, INT_FIELD, ONE)],
    },
)


async def read_hop(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The kind of a caller's message, and the id of the peer that it wants. Raises as :func:`read_delimited`."""
    message = await read_delimited(CIRCUIT_MESSAGES["HopMessage"], reader, CAP)
    if len(message.peer.id) > LONGEST_ID:
        raise BadMessage("not a peer id")
    return message.type, message.peer.id


async def read_stop_status(reader: asyncio.StreamReader) -> int:
    """The status in the called side's answer."""
    message = await read_delimited(CIRCUIT_MESSAGES["StopMessage"], reader, CAP)
    if message.type != STOP_STATUS:
        raise BadMessage("not a status")
    return int(message.status)


def hop_status(status: int) -> bytes:
    """The relay's answer to a caller, without a limit: libp2p allows few protocols on a limited circuit."""
    return delimited(CIRCUIT_MESSAGES["HopMessage"](type=STATUS, status=status))


def stop_connect(caller: bytes) -> bytes:
    """Tells the called side the id (bytes) of the ``caller``."""
    return delimited(CIRCUIT_MESSAGES["StopMessage"](type=STOP_CONNECT, peer={"id": caller}))
