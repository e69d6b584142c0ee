"""The DHT of an invited swarm: hivemind's authorizer and validators with the swarm's rules.

Requests and answers carry the certificate and are signed with the key that it names. A member's record has a
subkey with its public key and is signed with that key, so no peer can write the record of another. The only other
record is the owner's list of revocations: members read it, and each of them keeps it alive.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.proto import crypto_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer
from hivemind.utils.auth import TokenAuthorizerBase
from hivemind.utils.crypto import RSAPrivateKey
from pydantic import ValidationError

from peer import clock
from peer.errors import UserError, one_line
from peer.logs import fields, get_logger
from peer.p2p import identity
from peer.p2p.addresses import owner_of_subkey
from peer.p2p.admission.invitation import Admission, Certificate, Revocations, accept
from peer.p2p.record_limits import Limit, RecordLimits

log = get_logger("admission")

CERTIFICATE_CAP = 1024  # bytes
REVOCATIONS = "revocations"  # DHT key of the list
REVOCATIONS_BYTES = 64 * 1024
REVOCATIONS_LIFETIME = 3600.0  # seconds
REVOCATIONS_PERIOD = 10.0  # seconds
REVOCATIONS_TIMEOUT = 10.0  # seconds for one look


class Authority:
    """What a node of an invited swarm needs in addition to its settings; ``key``: the file of its libp2p identity."""

    def __init__(self, admission: Admission, key: Path) -> None:
        """Raises :class:`UserError` when other members would refuse our certificate."""
        objection = admission.objection(admission.own, identity.load_or_create(key))
        if objection:
            raise UserError(f"{objection}; ask the swarm's owner for a new one (noloco-bootstrap invite)")
        self.admission = admission
        private = _private_key(key)
        self.authorizer = Authorizer(admission, private)
        signatures = RSASignatureValidator(private)
        limits = RecordLimits({Rules.revocations: Limit(REVOCATIONS_BYTES, REVOCATIONS_LIFETIME)})
        self.validator = Validators([limits, signatures, Rules(admission)])
        self.tag = signatures.local_public_key.decode()  # ends the subkey of this peer's record


def invited(invitation: Path, key: Path, owner: str | None) -> Authority:
    """From the file ``invitation``, whose identity is written to ``key``; ``owner`` as in :func:`invitation.accept`."""
    accepted = accept(invitation, key, owner)
    return Authority(Admission(accepted.owner, accepted.certificate), key)


class Authorizer(TokenAuthorizerBase):
    """A token is a certificate, as JSON, and the public key of the identity that it is for."""

    def __init__(self, admission: Admission, private: RSAPrivateKey) -> None:
        super().__init__(private)
        self._admission = admission

    async def get_token(self) -> AccessToken:
        public = self.local_public_key.to_bytes()
        return AccessToken(username=self._admission.own.model_dump_json(), public_key=public)

    def is_token_valid(self, access_token: AccessToken) -> bool:
        certificate = _certificate(access_token.username)
        if certificate is None:
            return False
        return not self._admission.objection(certificate, peer_id_of(access_token.public_key))

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        return False


class Validators(CompositeValidator):
    """hivemind's check of signatures raises for malformed keys; here they are invalid."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            return bool(super().validate(record))
        except Exception:  # noqa: BLE001 - a stranger's bytes, and every library of them has its own error
            return False


class Rules(RecordValidatorBase):
    """Which records the DHT may hold. Signatures have been checked before."""

    revocations = DHTID.generate(source=REVOCATIONS).to_bytes()

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def validate(self, record: DHTRecord) -> bool:
        if record.key == self.revocations:
            found = decode_revocations(_unpacked(record.value))
            return found is not None and self._admission.learn(found)
        subkey = _unpacked(record.subkey)
        if not isinstance(subkey, str):
            return False
        peer_id, public = owner_of_subkey(subkey)
        return bool(peer_id) and peer_id == peer_id_of(public.encode())


@lru_cache(maxsize=4096)
def peer_id_of(public: bytes) -> str:
    """libp2p id (base58) of an RSA key in OpenSSH's form; empty when it is malformed."""
    try:
        key = serialization.load_ssh_public_key(public)
        encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=key.public_bytes(encoding, form))
        return identity.id_of(message.SerializeToString())
    except Exception:  # noqa: BLE001 - a stranger's bytes, and every library of them has its own error
        return ""


@lru_cache(maxsize=4096)
def _certificate(text: str) -> Certificate | None:
    try:
        return Certificate.model_validate_json(text) if len(text) <= CERTIFICATE_CAP else None
    except ValidationError:
        return None


def _private_key(path: Path) -> RSAPrivateKey:
    private = RSAPrivateKey.__new__(RSAPrivateKey)
    private.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(path.read_bytes()).data})
    return private


def _unpacked(data: bytes) -> object:
    try:
        return MSGPackSerializer.loads(data)
    except Exception:  # noqa: BLE001 - msgpack has many errors for a stranger's bytes
        return None


async def keep_revocations(dht: Any, admission: Admission) -> None:
    """Read and store the list every :data:`REVOCATIONS_PERIOD` seconds, until cancelled. ``dht``: hivemind's node."""
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
        await asyncio.sleep(REVOCATIONS_PERIOD)


def decode_revocations(value: object) -> Revocations | None:
    """A list that any node may have written: the caller must check its signature."""
    if not isinstance(value, str) or len(value) > REVOCATIONS_BYTES:
        return None
    try:
        return Revocations.model_validate_json(value)
    except ValidationError:
        return None
