"""A peer's libp2p identity: an RSA key in a file. The file is secret: a process that has it is the peer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hivemind.p2p import P2P, PeerID

from peer.config.files import replacing
from peer.errors import UserError, of_disk

LONGEST_ID = 64  # bytes of a peer id


def load_or_create(path: Path) -> str:
    """Peer id (base58) of the key in ``path``; a new key is written when there is none.

    Raises :class:`UserError`, or :class:`peer.errors.RunError` when the disk is full.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, 0o600) as new:  # with half a key no later start would succeed
                P2P.generate_identity(str(new))
        data = path.read_bytes()
    except OSError as error:
        advice = "; check its owner and permissions, or name another (peer.identity, or --identity of noloco-bootstrap)"
        raise of_disk(f"identity file {path}", error, advice) from None
    try:
        return str(PeerID.from_identity(data).to_base58())
    except Exception:  # noqa: BLE001 - protobuf, ASN.1 and value errors all mean the same to the user
        raise UserError(
            f"identity file {path}: not a key; restore it from a backup, or delete it to become a new peer"
        ) from None


def id_of(public: bytes) -> str:
    """Peer id (base58) of an RSA key as libp2p stores it: its SHA-256, as of each key of more than 42 bytes."""
    return str(PeerID(b"\x12\x20" + hashlib.sha256(public).digest()).to_base58())


def stream_of(peer_id: str) -> int:
    """Number of the data stream that belongs to an identity: different peers read different data."""
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:6], "big")
