"""The HTTP server of a peer's series. Anybody may connect to it, so who says nothing is hung up on, and few are served
at once.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from peer import clock
from peer.logs import get_logger

log = get_logger("metrics")

METRICS_CONNECTIONS = 32  # at once, each a thread; for one more the oldest ends


class MetricsServer(ThreadingWSGIServer):
    """Serves in threads of its own until :meth:`stop`. Raises ``OSError``."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, place = found[0][0], found[0][4]
        self._lock = threading.Lock()
        self._served: dict[Any, None] = {}  # the oldest first
        super().__init__((str(place[0]), port), _Scrape)
        self.set_app(_logged(make_wsgi_app(registry)))
        clock.begin_thread("metrics", self.serve_forever)

    def stop(self) -> None:
        self.shutdown()  # it waits for the thread
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a forked process (a data loader) has a copy of it
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._served) >= METRICS_CONNECTIONS:
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


class _Scrape(WSGIRequestHandler):
    timeout = 10  # seconds for a client to say or take something

    def get_stderr(self) -> Any:
        """No traceback when a client does not take its answer."""
        return io.StringIO()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a scraper asks every few seconds."""


def _logged(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """An error of a series is a line; its client gets status 500."""

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception as error:
            log.error("/metrics: %s: %s", type(error).__name__, error)
            raise

    return answer
