"""The owner of an invited swarm: a key, and a book of the invitations and revocations.

noloco-bootstrap invite alice --owner owner.key      writes alice.invitation
noloco-bootstrap revoke alice --owner owner.key      a bootstrap node with --owner owner.key tells everybody

The key can admit anybody, so only the owner and the bootstrap node have it. The book is a JSON file next to it.
"""

from __future__ import annotations

import time
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from peer.config.files import write_whole
from peer.errors import UserError, of_disk
from peer.p2p import identity
from peer.p2p.admission import invitation
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.admission.invitation import REVOKED, Admission, Owner

DAY = 86400.0
PRIVATE = 0o600  # only the owner may read it
SERVES = 3650  # days for which a bootstrap node invites itself


class InvitedPeer(BaseModel, extra="forbid"):
    """One invitation."""

    name: str
    peer_id: str
    expires: float  # unix seconds
    revoked: bool = False


class Book(BaseModel, extra="forbid"):
    """``number`` grows with every revocation."""

    number: int = 0
    invited: list[InvitedPeer] = []

    def revoked(self) -> list[str]:
        """Revoked ids whose certificates have not expired."""
        now = time.time()
        return [it.peer_id for it in self.invited if it.revoked and it.expires > now]


def load_or_create(path: Path) -> Owner:
    """The owner's key (Ed25519, PEM); a new one is written when there is none."""
    try:
        if not path.exists():
            form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            path.parent.mkdir(parents=True, exist_ok=True)
            pem = Ed25519PrivateKey.generate().private_bytes(*form)
            write_whole(path, pem.decode(), "--owner ", PRIVATE)
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise of_disk(f"--owner {path}", error) from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"--owner {path}: not an Ed25519 key in PEM; restore it, or name a new file to become an owner")
    return Owner(key)


def invite(path: Path, name: str, days: float, out: Path) -> str:
    """Write an invitation to ``out``; returns what to tell the owner."""
    owner, book = load_or_create(path), read(path)
    if out.exists():
        raise UserError(f"--out {out}: it exists already; an invitation is for one peer, name another file")
    made = invitation.invite(owner, name, time.time() + days * DAY)
    certificate = made.certificate
    book.invited.append(InvitedPeer(name=name, peer_id=certificate.peer_id, expires=certificate.expires))
    _write(path, book)
    write_whole(out, made.model_dump_json(indent=1) + "\n", mode=PRIVATE)
    until = time.strftime("%Y-%m-%d", time.gmtime(certificate.expires))
    return (
        f"invited {name} until {until}: {out} (peer.invitation; it is a key: send it over a secure channel)\n"
        f"in every config: run.admission=invite run.owner={owner.public}"
    )


def revoke(path: Path, name: str) -> str:
    """Mark every invitation of that name or peer id; returns what to tell the owner."""
    if not path.exists():
        raise UserError(f"--owner {path}: no such file")
    book = read(path)
    matching = [it for it in book.invited if name in (it.name, it.peer_id) and not it.revoked]
    if not matching:
        raise UserError(f"{name}: no invitation of that name or peer id that is not revoked yet, see {_book(path)}")
    for entry in matching:
        entry.revoked = True
    if len(book.revoked()) > REVOKED:
        raise UserError(f"more than {REVOKED} revoked invitations; start anew with another owner's key")
    book.number = max(book.number + 1, int(time.time()))
    _write(path, book)
    return f"revoked {len(matching)} of {name}; a bootstrap node with --owner {path} tells the swarm"


def authority(path: Path, key: Path) -> Authority:
    """For a bootstrap node with the identity file ``key``: the owner invites it."""
    owner = load_or_create(path)
    peer_id = identity.load_or_create(key)
    found = Authority(Admission(owner.public, owner.certify(peer_id, "bootstrap", time.time() + SERVES * DAY)), key)
    publish(path, found.admission)
    return found


def publish(path: Path, admission: Admission) -> None:
    """Read the book again; the node gives its revocations to the swarm."""
    book = read(path)
    if book.number > admission.revocations.number:
        admission.learn(load_or_create(path).revoke(book.number, book.revoked()))


def read(path: Path) -> Book:
    """The book of the owner with the key ``path``."""
    book = _book(path)
    try:
        return Book.model_validate_json(book.read_bytes()) if book.exists() else Book()
    except OSError as error:
        raise UserError(f"{book}: {error.strerror}; without it revoked peers are admitted again") from None
    except ValueError:
        raise UserError(f"{book}: not a book; restore it, or revoked peers are admitted again") from None


def _book(path: Path) -> Path:
    return path.with_name(path.name + ".book.json")


def _write(path: Path, book: Book) -> None:
    write_whole(_book(path), book.model_dump_json(indent=1) + "\n", mode=PRIVATE, like=path)  # the node must read it
