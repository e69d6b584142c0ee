"""TLS 1.3 between two members that know each other's certificate, on sockets that do not block.

Each process makes one key and one self-signed certificate. A member sends it over the p2p stream, which is
authenticated, so the certificate belongs to the libp2p id at the other end. A side trusts exactly the certificate that
it was sent: as the only root, and compared byte by byte after the handshake. Nothing is resumed.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Value = TypeVar("Value")

# A machine's clock may be wrong, and a key lives as long as its process.
VALID_FROM, VALID_UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(2999, 1, 1)
UNSENT = 256 * 1024  # bytes that the system holds of a connection, besides those on their way
CONGESTION = b"bbr"  # where the system allows it


class Credentials:
    """This process' key. ``certificate``: DER."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "noloco")])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        made = builder.not_valid_before(VALID_FROM).not_valid_after(VALID_UNTIL).sign(key, hashes.SHA256())
        self.certificate = made.public_bytes(serialization.Encoding.DER)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._both = private + made.public_bytes(serialization.Encoding.PEM)

    def context(self, theirs: bytes, *, server: bool) -> ssl.SSLContext:
        """For connections with the holder of the certificate ``theirs`` (DER). Raises ``ssl.SSLError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=theirs)
        if server:
            context.num_tickets = 0
        with tempfile.NamedTemporaryFile() as file:  # ssl reads keys from files only
            file.write(self._both)
            file.flush()
            context.load_cert_chain(file.name)
        return context


async def handshake(sock: socket.socket, context: ssl.SSLContext, theirs: bytes, *, server: bool) -> ssl.SSLSocket:
    """TLS on a connected socket, which is used up. Raises ``OSError``. The caller sets the deadline."""
    secure = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    try:
        await ready(secure, secure.do_handshake)
        if secure.getpeercert(binary_form=True) != theirs:
            raise ConnectionRefusedError("it has another certificate")
    except BaseException:
        secure.close()
        raise
    return secure


async def ready(sock: socket.socket, work: Callable[[], Value]) -> Value:
    """The result of ``work`` on a socket that does not block, once the socket lets it happen."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return work()
        except (ssl.SSLWantReadError, BlockingIOError):
            watch, forget = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, forget = loop.add_writer, loop.remove_writer
        came = loop.create_future()
        watch(sock, _wake, came)
        try:
            await came
        finally:
            forget(sock)


def _wake(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)


async def read(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes; few, of a side that is not known yet. Raises ``OSError``."""
    room = bytearray(count)
    left = memoryview(room)
    while left:
        size = await ready(sock, partial(sock.recv_into, left))
        if not size:
            raise ConnectionResetError("the other side has closed it")
        left = left[size:]
    return bytes(room)


def tune(sock: socket.socket) -> None:
    """Requests go at once; congestion control is the system's best for long lines. Buffers grow as the system says, but
    what is not on its way yet waits in this process, where it is not counted as sent.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    if hasattr(socket, "TCP_CONGESTION"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
        except OSError:
            return  # not in this kernel, or not for this user
