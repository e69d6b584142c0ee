"""A small real HTTP server with the page and a given ``/swarm.json``. To look at it by hand:

python -m tests.swarm.support.page_server --peers 4 --port 9400
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dht_bootstrap import page
from tests.swarm.support import page_sample
from tests.swarm.support.page_sample import Json


class PageServer:
    """Calls ``swarm()`` at each request; ``None``: the directory cannot be read, 503."""

    def __init__(self, swarm: Callable[[], Json | None], port: int = 0) -> None:
        self.swarm = swarm
        self.asked = 0
        self.missing: list[str] = []  # requested paths that do not exist
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    owner: PageServer
    timeout = 10

    def do_GET(self) -> None:
        if self.path == "/swarm.json":
            self.owner.asked += 1
            data = self.owner.swarm()
            body = {"error": "no answer from the DHT within 3 s"} if data is None else data
            self._send(503 if data is None else 200, json.dumps(body).encode(), "application/json")
            return
        found = page.answer(self.path)
        if found is None:
            self.owner.missing.append(self.path)
            self._send(404, b"", "text/plain")
        else:
            self._send(200, *found)

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        for name, value in {**page.HEADERS, "Content-Type": content_type, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--port", type=int, default=9400)
    parser.add_argument("--minutes", type=float, default=15, help="how long the swarm has trained already")
    parser.add_argument("--warnings", action="store_true")
    parser.add_argument("--hostile", action="store_true")
    args = parser.parse_args()
    began = time.time() - 60 * args.minutes

    def swarm() -> Json:
        now = time.time()
        names = page_sample.HOSTILE if args.hostile else None
        it = page_sample.run("demo", args.peers, now, began, names)
        return page_sample.swarm([page_sample.with_warnings(it) if args.warnings else it] if args.peers else [], now)

    server = PageServer(swarm, args.port)
    print(f"{server.address} until Ctrl+C")
    try:
        threading.Event().wait(3600)
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
