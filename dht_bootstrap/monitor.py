"""The bootstrap's HTTP server, for people, Prometheus and health checks.

/            the page            /targets   Prometheus' http_sd: the peers that can be scraped
/swarm.json  what it shows       /metrics   the swarm's series, from the records in the DHT
                                 /healthz   state of the node, and its number of peers
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dht_bootstrap import page
from dht_bootstrap.collector import SwarmCollector
from dht_bootstrap.configurations import Configurations
from dht_bootstrap.contributors import Contributors
from dht_bootstrap.history import RunHistory
from dht_bootstrap.targets import Networks, targets
from dht_bootstrap.view import run_view
from dht_bootstrap.watch import Watch
from peer import __version__
from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.p2p.dial import count_peers
from peer.p2p.node import Node
from peer.swarm.directory.ended import ENDED_PROTOCOL
from peer.swarm.state_transfer.donor import STATE_PROTOCOL

log = get_logger("monitor")
HEALTH_TIMEOUT = 3.0
POLL = 0.1  # seconds: as long may the end of the server take
PACKED = 1400  # bytes: an answer that fits into one packet is not compressed


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    content_type: str = "application/json; charset=utf-8"


def json_answer(status: int, body: object) -> HttpAnswer:
    """``body`` as JSON that every parser reads: a number that is not finite becomes ``null``."""
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError:
        text = json.dumps(_nulled(body), allow_nan=False)
    return HttpAnswer(status, text.encode())


def _nulled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nulled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_nulled(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _live_first(item: tuple[str, RunHistory]) -> tuple[bool, float, str]:
    """Order of the runs: live ones by name, then those that have ended, the last one first."""
    return bool(item[1].ended_at), -item[1].ended_at, item[0]


class Monitor:
    """Serves in threads of its own until closed. ``networks``: where Prometheus may be sent (targets.py)."""

    def __init__(
        self, node: Node, host: str, port: int, networks: Networks = (), contributors: Contributors | None = None
    ) -> None:
        self._node, self._watch = node, Watch(node, contributors)
        self._configurations = Configurations(self._watch)
        registry = CollectorRegistry()
        registry.register(SwarmCollector(self._watch))
        routes: dict[str, Callable[[], HttpAnswer]] = {
            "/healthz": self._healthz,
            "/targets": lambda: self._of_runs(lambda runs: targets(runs, networks)),
            "/metrics": lambda: HttpAnswer(200, generate_latest(registry), CONTENT_TYPE_LATEST),
            "/swarm.json": lambda: self._of_runs(self._swarm),
        }
        handler = type("Handler", (_Handler,), {"routes": routes})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise UserError(
                f"port occupied: monitor {host}:{port}: {error.strerror}; choose another --http-port"
            ) from None
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": POLL}, name="monitor", daemon=True
        )
        self._thread.start()

    def watch(self) -> None:
        """The node has started: from now on read the directory and the configurations, and tell others of them."""
        self._node.spawn(self._watch.read_on())
        self._node.spawn(self._configurations.read_on())
        self._node.spawn(self._node.serve(ENDED_PROTOCOL, self._watch.tell_of_ended))
        self._node.spawn(self._node.serve(STATE_PROTOCOL, self._configurations.tell))

    def save(self) -> None:
        """Write what outlives this process."""
        with self._watch.lock:
            text = self._watch.contributors.text()
        self._watch.contributors.write(text)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _healthz(self) -> HttpAnswer:
        try:
            peers = self._node.call(count_peers(self._node.p2p), HEALTH_TIMEOUT)
        except (RunError, TimeoutError) as error:
            return json_answer(503, {"status": "failing", "reason": self._node.failure or str(error)})
        return json_answer(200, {"status": "ok", "peer_id": self._node.peer_id, "connected_peers": peers})

    def _of_runs(self, made: Callable[[dict[str, RunHistory]], object]) -> HttpAnswer:
        if self._watch.failure:  # Prometheus keeps what it had; with an empty list it would forget all
            return json_answer(503, {"error": self._watch.failure})
        with self._watch.lock:
            body = made(self._watch.runs)
        return json_answer(200, body)

    def _swarm(self, runs: dict[str, RunHistory]) -> dict[str, Any]:
        watch, now = self._watch, time.time()
        return {
            "now": now,
            "version": __version__,
            "peer_id": self._node.peer_id,
            "addresses": list(self._node.addresses),
            "connected_peers": watch.connected,
            "read_age": watch.read_age,
            "read_seconds": watch.read_seconds,
            "invited": self._node.invited,
            "runs": [
                {**run_view(name, run, now), "configuration": self._configurations.view(name, run)}
                for name, run in sorted(runs.items(), key=_live_first)
            ],
            "contributors": watch.contributors.view(now),
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """No traceback when a client hangs up."""
        log.debug("%s: %s", client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    routes: dict[str, Callable[[], HttpAnswer]]
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in self.routes:
            try:
                answer = self.routes[path]()
            except Exception as error:  # noqa: BLE001 - the client is told, and the others go on
                log.error("%s: %s: %s", path, type(error).__name__, error)
                answer = json_answer(500, {"error": type(error).__name__})
        else:
            file = page.answer(path)
            missing = {"error": "not found", "paths": ["/", *self.routes]}
            answer = HttpAnswer(200, *file) if file is not None else json_answer(404, missing)
        body, packs = answer.body, "gzip" in self.headers.get("Accept-Encoding", "") and len(answer.body) > PACKED
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        if packs:  # of 200 peers, swarm.json is most of a megabyte
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept-Encoding")
        for name, value in page.HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a scraper asks every few seconds."""
