"""A peer's libp2p identity: an RSA key in a file. Whoever has the file is the peer, so it is never shared."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from pydantic import ValidationError

from peer.errors import UserError
from peer.swarm.invitation import Invitation, Owner


def load_or_create(path: Path) -> str:
    """Peer id (base58) of the key in ``path``; a new key is written when there is none."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            P2P.generate_identity(str(path))
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"identity file {path}: {error.strerror}; check its owner and permissions, "
            "or name another with peer.identity"
        ) from None
    try:
        return str(PeerID.from_identity(data).to_base58())
    except Exception:  # noqa: BLE001 - protobuf, ASN.1 and value errors all mean the same to the user
        raise UserError(
            f"identity file {path}: not a key; restore it from a backup, or delete it to become a new peer"
        ) from None


def stream_of(peer_id: str) -> int:
    """The data stream that belongs to an identity: different peers read different data."""
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:6], "big")


def invite(owner: Owner, name: str, expires: float) -> Invitation:
    """A new identity, and the owner's certificate for it until ``expires`` (unix seconds)."""
    with tempfile.TemporaryDirectory(prefix="noloco-invite-") as folder:
        key = Path(folder) / "identity.key"
        peer_id = load_or_create(key)
        identity = base64.b64encode(key.read_bytes()).decode()
    return Invitation(certificate=owner.certify(peer_id, name, expires), owner=owner.public, identity=identity)


def accept(path: Path, key: Path, owner: str | None) -> Invitation:
    """The invitation in the file ``path``; its identity is written to ``key``. ``owner``: of the swarm, public key;
    ``None``: whoever has signed it.
    """
    try:
        invitation = Invitation.model_validate_json(path.read_bytes())
        identity = base64.b64decode(invitation.identity, validate=True)
        if owner not in (None, invitation.owner):
            raise UserError(f"invitation {path}: it is of the owner {invitation.owner}, run.owner is {owner}")
        if not key.exists() or key.read_bytes() != identity:
            key.unlink(missing_ok=True)
            key.touch(mode=0o600)
            key.write_bytes(identity)
    except OSError as error:
        raise UserError(f"invitation {error.filename}: {error.strerror}") from None
    except (ValidationError, ValueError):
        raise UserError(f"invitation {path}: not an invitation; ask the swarm's owner for the file again") from None
    return invitation
