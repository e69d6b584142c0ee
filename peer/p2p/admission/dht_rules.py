"""The DHT of an invited swarm: who may ask and write, and the owner's list of revocations.

Requests and answers carry a certificate for the peer at the other end of the connection, whose id libp2p has proved
(dht/requests.py). So does the subkey of each record (dht/authors.py). The only other record is the list of revocations:
members read it, and each of them keeps it alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from hivemind.dht.routing import DHTID
from pydantic import ValidationError

from peer import clock
from peer.errors import UserError, one_line
from peer.logs import fields, get_logger
from peer.p2p import identity
from peer.p2p.admission.invitation import Admission, Certificate, Revocations, accept
from peer.p2p.dht.authors import Author
from peer.p2p.dht.limits import RecordLimit

log = get_logger("admission")

CERTIFICATE_CAP = 1024  # characters
REVOCATIONS = "revocations"  # DHT key of the list
REVOCATIONS_BYTES = 64 * 1024
REVOCATIONS_LIFETIME = 3600.0  # seconds
REVOCATIONS_PERIOD = 10.0  # seconds
REVOCATIONS_TIMEOUT = 10.0  # seconds for one look


class Authority(Author):
    """A member of an invited swarm; ``key``: the file of its libp2p identity."""

    def __init__(self, admission: Admission, key: Path) -> None:
        """Raises :class:`UserError` when other members would refuse our certificate."""
        objection = admission.objection(admission.own, identity.load_or_create(key))
        if objection:
            raise UserError(f"{objection}; ask the swarm's owner for a new one (noloco-bootstrap invite)")
        self.admission = admission
        self.certificate = admission.own.model_dump_json()
        revocations = RecordLimit(REVOCATIONS_BYTES, REVOCATIONS_LIFETIME, self._learns)
        super().__init__(key, {DHTID.generate(source=REVOCATIONS).to_bytes(): revocations})

    def admits(self, peer_id: str, certificate: str) -> bool:
        """Does the certificate (JSON) let this peer take part?"""
        if len(certificate) > CERTIFICATE_CAP:  # else any text of it would be kept below
            return False
        found = _certificate(certificate)
        return found is not None and not self.admission.objection(found, peer_id)

    def _learns(self, text: str) -> bool:
        found = decode_revocations(text)
        return found is not None and self.admission.learn(found)


def invited(invitation: Path, key: Path, owner: str | None) -> Authority:
    """From the file ``invitation``, whose identity is written to ``key``; ``owner`` as in :func:`invitation.accept`."""
    accepted = accept(invitation, key, owner)
    return Authority(Admission(accepted.owner, accepted.certificate), key)


@lru_cache(maxsize=4096)
def _certificate(text: str) -> Certificate | None:
    try:
        return Certificate.model_validate_json(text)
    except ValidationError:
        return None


async def keep_revocations(dht: Any, admission: Admission, then: Callable[[], None]) -> None:
    """Read and store the list every :data:`REVOCATIONS_PERIOD` seconds, and call ``then``, until cancelled: the list
    may be another one, or an invitation may have expired. ``dht``: hivemind's node.
    """
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
                    expiration = clock.unix() + REVOCATIONS_LIFETIME
                    await dht.store(REVOCATIONS, known.model_dump_json(), expiration_time=expiration)
                    stored = known.number
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises, the next look may be better
            log.debug("no revocations: %s", one_line(error))
        if admission.revocations.number > before:
            log.info("revoked: %s", fields(peers=len(admission.revocations.peer_ids)))
        then()
        await asyncio.sleep(REVOCATIONS_PERIOD)


def decode_revocations(value: object) -> Revocations | None:
    """A list that any node may have written: the caller must check its signature."""
    if not isinstance(value, str) or len(value) > REVOCATIONS_BYTES:
        return None
    try:
        return Revocations.model_validate_json(value)
    except ValidationError:
        return None
