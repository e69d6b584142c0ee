"""An invited swarm: its owner, real certificates and lists of revocations. The simulated transport proves ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.p2p.admission.invitation import Admission, Certificate, Owner, Revocations

NEVER = 1e11  # unix seconds


class Stubborn(Admission):
    """Of a member that goes on when its invitation has ended, and keeps no list of revocations. It checks others."""

    def objection(self, certificate: Certificate, peer_id: str) -> str:
        return "" if peer_id == self.own.peer_id else super().objection(certificate, peer_id)

    def learn(self, revocations: Revocations) -> bool:
        return True


@dataclass(frozen=True)
class SimulatedAuthority:
    """What a node needs of :class:`peer.p2p.admission.dht_rules.Authority`."""

    admission: Admission
    tag: str


class Invitations:
    """The owner of a swarm, and what it has signed. ``public``: its key, for ``run.owner``."""

    def __init__(self, seed: int) -> None:
        secret = hashlib.sha256(f"owner {seed}".encode()).digest()
        self._owner = Owner(Ed25519PrivateKey.from_private_bytes(secret))
        self._revoked: list[str] = []
        self.public = self._owner.public

    def authority(self, peer_id: str, expires: float = NEVER, *, stubborn: bool = False) -> SimulatedAuthority:
        """Of a new process of ``peer_id``; ``expires`` in unix seconds."""
        certificate = self._owner.certify(peer_id, peer_id[-6:], expires)
        kind = Stubborn if stubborn else Admission
        return SimulatedAuthority(kind(self.public, certificate), f"[owner:ssh-rsa {peer_id}]")

    def revoke(self, peer_id: str) -> None:
        self._revoked.append(peer_id)

    @property
    def revocations(self) -> Revocations:
        return self._owner.revoke(len(self._revoked), self._revoked)
