"""A peer's Prometheus series, their HTTP endpoint, and the timer that splits its time into activities."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from peer import __version__, clock
from peer.telemetry.http_server import HttpServer, cannot_listen, series_answer
from peer.telemetry.series import ACTIVITIES, IDLE_ACTIVITIES, OF_PEER, PREFIX, SECONDS, running

METRICS_PORT = 9464
KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": partial(Histogram, buckets=SECONDS)}


class Metrics(Collector):
    """The series of one peer, in a registry of their own. ``metrics["round"]`` is a prometheus_client object.

    ``refresh``: called before each scrape, because this object is the first collector of the registry, without series.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refresh: list[Callable[[], None]] = []
        self.registry.register(self)
        self._series: dict[str, Any] = {}
        for row in OF_PEER:
            series = KINDS[row.kind](PREFIX + row.name, row.help, row.labels, registry=self.registry)
            for value in row.values:
                series.labels(value)
            self._series[row.name] = series

    def set_build(self, *, method: str, run: str, config: str) -> None:
        """What this peer trains, once its model is there. ``config``: the digest of the run."""
        self["build_info"].labels(version=__version__, method=method, run=run, config=config).set(1)

    def __getitem__(self, name: str) -> Any:
        return self._series[name]

    def collect(self) -> Iterable[Metric]:
        for call in self.refresh:
            call()
        return ()

    def serve(self, host: str, port: int | None) -> tuple[str, Callable[[], None]]:
        """Serve over HTTP; returns ``host:port`` and a function that stops the server.

        Without ``port``: the default port, or any free port when the default is taken.
        """
        asked = METRICS_PORT if port is None else port
        try:
            server = HttpServer(host, asked, lambda _: series_answer(self.registry))
        except OSError as error:
            if port is None and error.errno == errno.EADDRINUSE:
                return self.serve(host, 0)
            raise cannot_listen(error, host, asked, "peer.metrics.host", "peer.metrics.port") from None
        return f"{host}:{server.server_port}", server.stop


class ActivityTimer:
    """Splits the time since its creation into activities without gaps: time outside all of them counts as ``apply``.

    ``synchronize`` waits for the accelerator, so that an activity ends when its work has ended; not at the end of one
    with ``queued``, whose work belongs to the activity that contains it, nor after an error: what the accelerator does
    may never end then, as with a rank that is lost. One thread begins activities; any thread may read the totals.
    """

    def __init__(self, metrics: Metrics, synchronize: Callable[[], None] | None = None) -> None:
        self._metrics, self._synchronize = metrics, synchronize
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(ACTIVITIES, 0.0)
        self._lap = self._totals.copy()
        self._activity = "apply"
        metrics["phase_info"].labels("apply").set(1)
        metrics.refresh.append(self._book)
        self._since = clock.monotonic()

    @contextmanager
    def __call__(self, activity: str, *, queued: bool = False) -> Iterator[None]:
        outer = self._activity
        self._book(activity)
        try:
            yield
            if self._synchronize is not None and not queued:
                self._synchronize()
        finally:
            self._book(outer)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of each activity so far, with the current one."""
        self._book()
        return dict(self._totals)

    def lap(self) -> dict[str, float]:
        """Seconds of each activity since the last call."""
        before, self._lap = self._lap, self.totals
        return {activity: total - before[activity] for activity, total in self._lap.items()}

    def idle_share(self) -> float:
        """Share of the time that this peer waited for a partner or its tensor; joins and pauses do not count."""
        totals = self.totals
        total = running(totals)
        return sum(totals[activity] for activity in IDLE_ACTIVITIES) / total if total else 0.0

    def _book(self, activity: str | None = None) -> None:
        """Add the time until now to the current activity; then ``activity`` begins."""
        with self._lock:
            now = clock.monotonic()
            self._totals[self._activity] += now - self._since
            self._metrics["phase_seconds_total"].labels(self._activity).inc(now - self._since)
            self._since = now
            if activity is not None:
                self._metrics["phase_info"].labels(self._activity).set(0)
                self._metrics["phase_info"].labels(activity).set(1)
                self._activity = activity
