"""A small real HTTP server with the page and a given ``/swarm.json``. To look at it by hand:

python -m tests.swarm.support.page_server --peers 4 --port 9400
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable

from dht_bootstrap import page
from peer.telemetry.http_server import HttpAnswer, HttpServer
from tests.swarm.support import page_sample
from tests.swarm.support.page_sample import Json


class PageServer:
    """Calls ``swarm()`` at each request; ``None``: the directory cannot be read, 503."""

    def __init__(self, swarm: Callable[[], Json | None], port: int = 0) -> None:
        self.swarm = swarm
        self.asked = 0
        self.missing: list[str] = []  # requested paths that do not exist
        self._server = HttpServer("127.0.0.1", port, self._answer)
        self.port = self._server.server_port
        self.close = self._server.stop

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def _answer(self, path: str) -> HttpAnswer:
        if path == "/swarm.json":
            self.asked += 1
            data = self.swarm()
            body = {"error": "no answer from the DHT within 3 s"} if data is None else data
            return HttpAnswer(503 if data is None else 200, json.dumps(body).encode())
        found = page.answer(path)
        if found is None:
            self.missing.append(path)
            return HttpAnswer(404, b"", "text/plain")
        return HttpAnswer(200, *found)


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
