"""The bootstrap's HTTP server, for people, Prometheus and health checks.

/            the page            /targets   Prometheus' http_sd: the peers that can be scraped
/swarm.json  what it shows       /metrics   the swarm's series, from the records in the DHT
                                 /healthz   state of the node, and its number of peers
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from dht_bootstrap import page
from dht_bootstrap.collector import SwarmCollector
from dht_bootstrap.configurations import Configurations
from dht_bootstrap.contributors import Contributors
from dht_bootstrap.history import RunHistory
from dht_bootstrap.targets import Networks, targets
from dht_bootstrap.view import run_view
from dht_bootstrap.watch import READ_PERIOD, Watch
from peer import __version__
from peer.errors import RunError
from peer.p2p.dial import count_peers
from peer.p2p.node import Node
from peer.swarm.directory.ended import ENDED_PROTOCOL
from peer.swarm.state_transfer.donor import STATE_PROTOCOL
from peer.telemetry.http_server import HttpAnswer, HttpServer, cannot_listen, series_answer
from peer.telemetry.run_log import nulled

OF_RUNS = ("/targets", "/swarm.json")  # no answer while the directory cannot be read
HEALTH_TIMEOUT = 3.0


def json_answer(status: int, body: object) -> HttpAnswer:
    """``body`` as JSON that every parser reads: a number that is not finite becomes ``null``."""
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError:
        text = json.dumps(nulled(body), allow_nan=False)
    return HttpAnswer(status, text.encode())


def _live_first(item: tuple[str, RunHistory]) -> tuple[bool, float, str]:
    """Order of the runs: live ones by name, then those that have ended, the last one first."""
    return bool(item[1].ended_at), -item[1].ended_at, item[0]


class SharedAnswer:
    """One answer for all who ask until the directory was read again, or for as long as that usually takes. To make it
    costs up to some tenths of a second with the lock of ``watch``, for which the node's network thread waits as well;
    or that thread is asked, and may not answer for seconds.
    """

    def __init__(self, watch: Watch, make: Callable[[], HttpAnswer]) -> None:
        self._watch, self._make = watch, make
        self._lock = threading.Lock()
        self._last: tuple[int, float, HttpAnswer] | None = None  # after so many readings; when, monotonic

    def __call__(self) -> HttpAnswer:
        with self._lock:  # who asks meanwhile gets it too
            read = self._watch.reads["ok"]
            if self._last is None or self._last[0] != read or time.monotonic() - self._last[1] > READ_PERIOD:
                answer = self._make()
                self._last = read, time.monotonic(), answer  # new for who has waited meanwhile, however long that took
            return self._last[2]


class Monitor:
    """Serves in threads of its own until closed. ``networks``: where Prometheus may be sent (targets.py)."""

    def __init__(
        self, node: Node, host: str, port: int, networks: Networks = (), contributors: Contributors | None = None
    ) -> None:
        self._node, self._watch = node, Watch(node, contributors)
        self._configurations = Configurations(self._watch)
        registry = CollectorRegistry()
        registry.register(SwarmCollector(self._watch))
        answers: dict[str, Callable[[], HttpAnswer]] = {
            "/healthz": self._healthz,
            "/targets": lambda: self._of_runs(lambda runs: targets(runs, networks)),
            "/metrics": lambda: series_answer(registry),
            "/swarm.json": lambda: self._of_runs(self._swarm),
        }
        self._routes = {path: SharedAnswer(self._watch, make) for path, make in answers.items()}
        try:
            self._server = HttpServer(host, port, self._answer)
        except OSError as error:
            raise cannot_listen(error, host, port, "--http-host", "--http-port") from None
        self.address = f"{host}:{self._server.server_port}"

    def watch(self) -> None:
        """The node has started: from now on read the directory and the configurations, and tell others of them."""
        self._node.keep(self._watch.read_on)
        self._node.keep(self._configurations.read_on)
        self._node.spawn(self._node.serve(ENDED_PROTOCOL, self._watch.tell_of_ended))
        self._node.spawn(self._node.serve(STATE_PROTOCOL, self._configurations.tell))

    def save(self) -> None:
        """Write what outlives this process."""
        with self._watch.lock:
            text = self._watch.contributors.model_dump_json()
        self._watch.contributors.write(text)

    def close(self) -> None:
        self._server.stop()

    def _answer(self, path: str) -> HttpAnswer:
        if path in OF_RUNS and (failure := self._watch.failure):  # at once, and not within a shared answer
            return json_answer(503, {"error": failure})  # Prometheus keeps what it had; an empty list would forget all
        if path in self._routes:
            return self._routes[path]()
        file = page.answer(path)
        missing = {"error": "not found", "paths": ["/", *self._routes]}
        return HttpAnswer(200, *file) if file is not None else json_answer(404, missing)

    def _healthz(self) -> HttpAnswer:
        try:
            peers = self._node.call(count_peers(self._node.p2p), HEALTH_TIMEOUT)
        except (RunError, TimeoutError) as error:
            return json_answer(503, {"status": "failing", "reason": self._node.failure or str(error)})
        return json_answer(200, {"status": "ok", "peer_id": self._node.peer_id, "connected_peers": peers})

    def _of_runs(self, view: Callable[[dict[str, RunHistory]], object]) -> HttpAnswer:
        """This ``view`` of them."""
        with self._watch.lock:
            body = view(self._watch.runs)
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
