"""Which node answers at an IP address and a port? Asked over a new TCP connection, without the p2p daemon.

The daemon would reuse an open connection, which proves nothing about the address. This is a plain connection with the
first half of libp2p's handshake: the other side's TLS certificate contains its libp2p key
(https://github.com/libp2p/specs/blob/master/tls/tls.md), and TLS proves that it holds the certificate. We send no
certificate, so no session is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from google.protobuf.message import DecodeError
from hivemind.proto import crypto_pb2

from peer.p2p.identity import id_of

_GREETING = (b"/multistream/1.0.0\n", b"/tls/1.0.0\n")
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"


@asn1.sequence
class SignedKey:
    """The extension of a libp2p certificate: the node's public key, and its signature over the certificate's key."""

    public_key: bytes
    signature: bytes


class NotLibp2p(Exception):
    """The side that answers is not a libp2p node."""


async def who_answers(host: str, port: int, timeout: float) -> str:
    """The peer id (base58) of the node that listens. Raises ``OSError``, ``TimeoutError`` or :class:`NotLibp2p`."""
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(b"".join(bytes([len(line)]) + line for line in _GREETING))
            for line in _GREETING:
                if await reader.readexactly(1 + len(line)) != bytes([len(line)]) + line:
                    raise NotLibp2p("it does not speak libp2p's TLS")
            await writer.start_tls(_context())
            session = writer.get_extra_info("ssl_object")
            return _peer_id(session.getpeercert(binary_form=True))
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            raise NotLibp2p("it does not speak libp2p") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):  # it closes the connection, as we sent no certificate
                writer.transport.abort()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # libp2p has no authorities: _peer_id verifies
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context


def _peer_id(certificate: bytes | None) -> str:
    """The id whose key has signed the certificate's. Raises :class:`NotLibp2p` when none has."""
    try:
        parsed = x509.load_der_x509_certificate(certificate or b"")
        extension = parsed.extensions.get_extension_for_oid(_EXTENSION).value
        assert isinstance(extension, x509.UnrecognizedExtension)
        signed = asn1.decode_der(SignedKey, extension.value)
        key = serialization.load_der_public_key(crypto_pb2.PublicKey.FromString(signed.public_key).data)
        if not isinstance(key, RSAPublicKey):
            raise ValueError("an identity is an RSA key here")
        form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        message = _SIGNED_PREFIX + parsed.public_key().public_bytes(*form)
        key.verify(signed.signature, message, padding.PKCS1v15(), hashes.SHA256())
    except (ValueError, AssertionError, DecodeError, x509.ExtensionNotFound, InvalidSignature, UnsupportedAlgorithm):
        raise NotLibp2p("its certificate has no libp2p identity") from None
    return id_of(signed.public_key)
