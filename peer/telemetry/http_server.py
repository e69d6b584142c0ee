"""The HTTP server of a peer's series and of the bootstrap's monitor. Anybody may connect to it, so who says nothing is
hung up on, and few are served at once.
"""

from __future__ import annotations

import errno
import gzip
import io
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from peer import clock
from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("http")

HTTP_CONNECTIONS = 32  # at once, each a thread; for one more the oldest ends
HEAD_BYTES = 16 * 1024  # of a request, until its headers end; Python itself would read 100 of 64 KiB, and copy them
POLL = 0.1  # seconds: as long may the end of the server take
PACKED = 1400  # bytes: an answer that fits into one packet is not compressed
HEADERS = {
    # No script, style, font or picture but our own, and nothing inline: an outsider's name for its peer stays text.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    content_type: str = "application/json; charset=utf-8"


def series_answer(registry: CollectorRegistry) -> HttpAnswer:
    """All series as Prometheus reads them."""
    return HttpAnswer(200, generate_latest(registry), CONTENT_TYPE_LATEST)


def cannot_listen(error: OSError, host: str, port: int, host_key: str, port_key: str) -> UserError:
    """What to tell of an error of :class:`HttpServer`; the keys are those by which the user chooses its place."""
    place, choose = f"{host}:{port}: {error.strerror}", f"choose another {port_key}"
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port occupied: {place}; {choose}")
    if error.errno == errno.EACCES:  # ports below 1024 are those of root
        return UserError(f"{port_key} {place}; {choose}")
    return UserError(f"{host_key} {host}: {error.strerror}; it must be an address of this machine")


class HttpServer(ThreadingHTTPServer):
    """Serves in threads of its own until :meth:`stop`. ``answer``: to a path. Raises ``OSError``."""

    def __init__(self, host: str, port: int, answer: Callable[[str], HttpAnswer]) -> None:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # of a name with both: Prometheus and the health check ask 127.0.0.1
        self.address_family, *_, place = min(found, key=lambda it: it[0] != socket.AF_INET)
        self.answer = answer
        self._lock = threading.Lock()
        self._served: dict[Any, None] = {}  # the oldest first
        super().__init__((str(place[0]), port), _Handler)
        clock.begin_thread("http", partial(self.serve_forever, POLL))

    def stop(self) -> None:
        self.shutdown()  # it waits for the thread
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a forked process (a data loader) has a copy of it
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._served) >= HTTP_CONNECTIONS:
                oldest = next(iter(self._served))
                del self._served[oldest]
                with suppress(OSError):  # its thread finds out, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._served[request] = None
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._served.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """No traceback when a client is slow or hangs up."""
        log.debug("%s: %s", client_address, sys.exc_info()[1])


class _Head(io.BufferedReader):
    """What a client says, by the line."""

    _left = HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:  # in a header the handler answers it with 431
            raise LineTooLong("head of a request")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = 10  # seconds for a client to say or take something

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile.detach())

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            answer = self.server.answer(path)
        except Exception as error:  # noqa: BLE001 - the client is told, and the others go on
            log.error("%.80r: %s: %s", path, type(error).__name__, error)  # anybody chooses the path
            answer = HttpAnswer(500, f'{{"error": "{type(error).__name__}"}}'.encode())
        body, packs = answer.body, "gzip" in self.headers.get("Accept-Encoding", "") and len(answer.body) > PACKED
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        if packs:  # of 200 peers, swarm.json is most of a megabyte
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a scraper asks every few seconds."""
