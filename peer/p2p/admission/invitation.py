"""Certificates that a swarm's owner signs, and the invitations that carry them.

The owner has an Ed25519 key (RFC 8032); its public half is ``run.owner``. An invitation is a file with a libp2p
identity and a certificate for it; a process that has the file is that peer. libp2p proves the id of the other end of a
stream; the certificate says that this id may take part. dht_rules.py checks it in the DHT, gate.py on streams.
"""

from __future__ import annotations

import base64
import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field, ValidationError

from peer import clock
from peer.errors import UserError, of_disk
from peer.p2p.identity import load_or_create
from peer.p2p.stream import Message

REVOKED = 1000  # ids in a list
INVITED_KEY = "invited.key"  # in a peer's folder: the identity of its invitation
Statement = TypeVar("Statement", bound="Signed")
Id = Annotated[str, Field(max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # unix time
Signature = Annotated[str, Field(max_length=88)]  # base64


class Signed(Message):
    """A statement of the owner. The signature covers the kind and all other fields, as canonical JSON."""

    signature: Signature = ""

    def payload(self) -> bytes:
        """The bytes that are signed."""
        said = {"kind": type(self).__name__, **self.model_dump(exclude={"signature"})}
        return json.dumps(said, sort_keys=True).encode()


class Certificate(Signed):
    """``peer_id`` may take part until ``expires``."""

    peer_id: Id
    name: Annotated[str, Field(max_length=64)]
    expires: Seconds


class Revocations(Signed):
    """These ids may not take part, whatever certificate they hold. The list with the highest number counts."""

    number: Annotated[int, Field(ge=0, lt=2**63)]
    peer_ids: Annotated[list[Id], Field(max_length=REVOKED)]


class Invitation(Message):
    """The content of the file. ``identity``: the private key as libp2p stores it, base64."""

    certificate: Certificate
    owner: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$")]  # public key, base64
    identity: Annotated[str, Field(max_length=8192)]


class Owner:
    """The owner, with the private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    def certify(self, peer_id: str, name: str, expires: float) -> Certificate:
        """``expires`` in unix seconds."""
        return self._signed(Certificate(peer_id=peer_id, name=name, expires=expires))

    def revoke(self, number: int, peer_ids: list[str]) -> Revocations:
        """The list with this ``number``."""
        return self._signed(Revocations(number=number, peer_ids=peer_ids))

    def _signed(self, blank: Statement) -> Statement:
        signature = base64.b64encode(self._key.sign(blank.payload())).decode()
        return blank.model_copy(update={"signature": signature})


class Admission:
    """What a member knows: the swarm's owner, its own certificate, and the revoked ids."""

    def __init__(self, owner: str, own: Certificate) -> None:
        self.owner, self.own = owner, own
        self.revocations = Revocations(number=0, peer_ids=[])
        self._revoked: frozenset[str] = frozenset()

    def objection(self, certificate: Certificate, peer_id: str) -> str:
        """Why the authenticated ``peer_id`` may not take part with this certificate; empty when it may."""
        if not _genuine(self.owner, certificate.payload(), certificate.signature):
            return "the invitation is not signed by the owner of this swarm"
        if certificate.peer_id != peer_id:
            return "the invitation is for another peer"
        if certificate.expires <= clock.unix():
            return "the invitation has expired"
        return "the invitation was revoked" if peer_id in self._revoked else ""

    def learn(self, revocations: Revocations) -> bool:
        """Accept a list; ``False`` when it is older than the known one or not signed by the owner."""
        if revocations.number < self.revocations.number:
            return False
        if not _genuine(self.owner, revocations.payload(), revocations.signature):
            return False
        self.revocations, self._revoked = revocations, frozenset(revocations.peer_ids)
        return True


def _genuine(owner: str, payload: bytes, signature: str) -> bool:
    try:
        _verify(owner, payload, signature)
    except (ValueError, InvalidSignature):
        return False
    return True


@lru_cache(maxsize=4096)  # which keeps no payload that has raised: anybody can send those, of 60 kB each
def _verify(owner: str, payload: bytes, signature: str) -> None:
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(owner, validate=True))
    key.verify(base64.b64decode(signature, validate=True), payload)


def invite(owner: Owner, name: str, expires: float) -> Invitation:
    """A new identity, and the owner's certificate for it until ``expires`` (unix seconds)."""
    with tempfile.TemporaryDirectory(prefix="noloco-invite-") as folder:
        key = Path(folder) / "identity.key"
        peer_id = load_or_create(key)
        identity = base64.b64encode(key.read_bytes()).decode()
    return Invitation(certificate=owner.certify(peer_id, name, expires), owner=owner.public, identity=identity)


def unless_empty(path: Path | None) -> Path | None:
    """The file of an invitation; an empty one stands for none (docker/compose.peer.yaml always mounts one)."""
    return None if path is None or (path.exists() and not path.stat().st_size) else path


def accept(path: Path, key: Path, owner: str | None) -> Invitation:
    """Read the invitation ``path`` and write its identity to ``key``. ``owner``: the expected public key, if any."""
    try:
        invitation = Invitation.model_validate_json(path.read_bytes())
        identity = base64.b64decode(invitation.identity, validate=True)
        if owner not in (None, invitation.owner):
            raise UserError(f"invitation {path}: its owner is {invitation.owner}, run.owner is {owner}")
        if not key.exists() or key.read_bytes() != identity:
            key.unlink(missing_ok=True)
            key.touch(mode=0o600)
            key.write_bytes(identity)
    except OSError as error:
        raise of_disk(f"invitation {error.filename or key}", error) from None  # a write that fails names no file
    except (ValidationError, ValueError):
        raise UserError(f"invitation {path}: not an invitation; ask the swarm's owner for the file again") from None
    return invitation
