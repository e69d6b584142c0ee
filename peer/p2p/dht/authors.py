"""Who wrote a record of the DHT: nobody can write that of another, in open swarms as in invited ones.

A subkey is ``<peer id>[owner:<public key>]``, in an invited swarm with ``[invited:<certificate>]`` after it. The id is
the hash of the key, and the value ends with a signature by it (hivemind's ``RSASignatureValidator``) over the key of
the DHT, the subkey, the value and the expiration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.validation import DHTRecord
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from peer.p2p import identity
from peer.p2p.dht.limits import RecordLimit, subkey_text, within_limits

KEY_BITS = (2048, 4096)  # of a key, and its exponent is 65537: the check of a signature costs little
EXPONENT = 65537
VERIFIED = 4096  # records that are remembered: most of what a reader finds is what it found before
_SUBKEY = re.compile(
    r"([1-9A-HJ-NP-Za-km-z]{1,128})(?:\[owner:(ssh-rsa [A-Za-z0-9+/=]+)\](?:\[invited:(.+)\])?)?", re.DOTALL
)


class RecordOwner(NamedTuple):
    """What a subkey says. ``public``: OpenSSH's form of the key; ``certificate``: JSON. Empty when it says nothing."""

    peer_id: str
    public: str = ""
    certificate: str = ""


def owner_of_subkey(subkey: object) -> RecordOwner:
    """The parts of a subkey; nothing has been checked. Empty when it is none."""
    found = _SUBKEY.fullmatch(subkey) if isinstance(subkey, str) else None
    return RecordOwner(*(part or "" for part in found.groups())) if found else RecordOwner("")


class Author:
    """Signs this node's records and checks those of all. ``key``: the file of its libp2p identity."""

    certificate = ""  # JSON, in an invited swarm

    def __init__(self, key: Path, plain: Mapping[bytes, RecordLimit] | None = None) -> None:
        """``plain``: as for :func:`within_limits`."""
        self.validator = _RecordValidator(_private_key(key), plain or {}, self.admits)
        self._owner = self.validator.local_public_key.decode()

    @property
    def tag(self) -> str:
        """What follows this peer's id in the subkey of its records."""
        return self._owner + (f"[invited:{self.certificate}]" if self.certificate else "")

    def admits(self, peer_id: str, certificate: str) -> bool:
        """May the authenticated ``peer_id`` take part? In an open swarm everybody may."""
        return True


class _RecordValidator(RSASignatureValidator):
    """hivemind's check of signatures, after those that take less time: the limits of a record, and its owner."""

    def __init__(
        self, private: RSAPrivateKey, plain: Mapping[bytes, RecordLimit], admits: Callable[[str, str], bool]
    ) -> None:
        super().__init__(private)
        self._plain, self._admits = plain, admits
        self._is_signed = lru_cache(VERIFIED)(super().validate)  # each record is checked once

    def validate(self, record: DHTRecord) -> bool:
        try:
            return within_limits(record, self._plain) and self._is_owned(record) and self._is_signed(record)
        except Exception:  # noqa: BLE001 - an outsider's bytes, and every library of them has its own error
            return False

    def _is_owned(self, record: DHTRecord) -> bool:
        """Is a subkey's id that of its key, and is it admitted?"""
        if record.subkey == DHTProtocol.IS_REGULAR_VALUE:
            return True
        owner = owner_of_subkey(subkey_text(record.subkey))
        return owner.peer_id == peer_id_of(owner.public.encode()) != "" and self._admits(*owner[::2])


@lru_cache(maxsize=4096)
def peer_id_of(public: bytes) -> str:
    """libp2p id (base58) of an RSA key in OpenSSH's form; empty when it is malformed."""
    try:
        key = serialization.load_ssh_public_key(public)
        if not isinstance(key, RSAPublicKey) or key.public_numbers().e != EXPONENT:
            return ""
        if not KEY_BITS[0] <= key.key_size <= KEY_BITS[1]:
            return ""
        encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=key.public_bytes(encoding, form))
        return identity.id_of(message.SerializeToString())
    except Exception:  # noqa: BLE001 - an outsider's bytes, and every library of them has its own error
        return ""


def _private_key(path: Path) -> RSAPrivateKey:
    private = RSAPrivateKey.__new__(RSAPrivateKey)
    private.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(path.read_bytes()).data})
    return private
