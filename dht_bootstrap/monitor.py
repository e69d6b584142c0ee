"""The bootstrap's http side: ``/healthz`` says whether the node works and how many peers it is connected to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from peer.errors import RunError, UserError
from peer.swarm.node import Node

ANSWER_SECONDS = 3.0


class Monitor:
    """Serves in threads of its own until closed."""

    def __init__(self, node: Node, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"node": node})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise UserError(
                f"port occupied: monitor {host}:{port}: {error.strerror}; choose another --http-port"
            ) from None
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    node: Node
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        if self.path != "/healthz":
            self._answer(404, {"error": "not found", "paths": ["/healthz"]})
            return
        try:
            peers = self.node.call(self.node.count_peers(), ANSWER_SECONDS)
        except (RunError, TimeoutError) as error:
            self._answer(503, {"status": "failing", "reason": self.node.failure or str(error)})
            return
        self._answer(200, {"status": "ok", "peer_id": self.node.peer_id, "connected_peers": peers})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a scraper asks every few seconds."""
