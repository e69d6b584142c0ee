"""The owner's list of revoked invitations: members read it from the DHT, and each of them keeps it alive there."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic import ValidationError

from peer.logs import fields, get_logger
from peer.p2p.admission.invitation import Admission, Revocations

log = get_logger("admission")

REVOCATIONS = "revocations"  # DHT key of the list
REVOCATIONS_BYTES = 64 * 1024
REVOCATIONS_LIFETIME = 3600.0  # seconds
REVOCATIONS_PERIOD = 10.0  # seconds
REVOCATIONS_TIMEOUT = 10.0  # seconds for one look


async def keep_revocations(dht: Any, admission: Admission) -> None:
    """Read and store it every :data:`REVOCATIONS_PERIOD` seconds, until cancelled. ``dht``: hivemind's node."""
    stored = 0
    while True:
        before = admission.revocations.number
        try:
            async with asyncio.timeout(REVOCATIONS_TIMEOUT):
                found = await dht.get(REVOCATIONS, latest=True)
                theirs = decode_revocations(found.value) if found is not None else None
                if theirs is not None:
                    admission.learn(theirs)
                known = admission.revocations
                if known.number and (theirs is None or theirs.number < known.number or stored < known.number):
                    expiration = time.time() + REVOCATIONS_LIFETIME
                    await dht.store(REVOCATIONS, known.model_dump_json(), expiration_time=expiration)
                    stored = known.number
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises, the next look may be better
            log.debug("no revocations: %s", str(error) or type(error).__name__)
        if admission.revocations.number > before:
            log.info("revoked: %s", fields(peers=len(admission.revocations.peer_ids)))
        await asyncio.sleep(REVOCATIONS_PERIOD)


def decode_revocations(value: object) -> Revocations | None:
    """A list that any node may have written: the caller must check its signature."""
    if not isinstance(value, str) or len(value) > REVOCATIONS_BYTES:
        return None
    try:
        return Revocations.model_validate_json(value)
    except ValidationError:
        return None
