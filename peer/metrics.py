"""Every Prometheus series of a peer, in one table, and the clock that splits a peer's time into phases.

Names follow Prometheus' rules: base units, counters end in ``_total``, every label value is there from the start.
The peer's id is a label of the scrape target, never of a series.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from peer import __version__
from peer.errors import UserError
from peer.rounds import Outcome, Reason

PREFIX = "noloco_"
PHASES = ("inner", "match", "exchange", "apply", "checkpoint", "eval", "join")
IDLE = ("match", "exchange")
DEFAULT_PORT = 9464
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300, 600)


@dataclass(frozen=True)
class Series:
    """One row: ``kind`` is a class of prometheus_client; ``values`` are all values of the only label."""

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


TABLE = (
    Series(
        "phase_seconds_total", Counter, "Time spent in each phase; match and exchange are idle time.", "phase", PHASES
    ),
    Series("phase_info", Gauge, "1 for the phase that the peer is in.", "phase", PHASES),
    Series("rounds_total", Counter, "Rounds by outcome of the exchange.", "outcome", tuple(Outcome)),
    Series("refusals_total", Counter, "What partners sent that was not used, by reason.", "reason", tuple(Reason)),
    Series(
        "exchange_bytes_total", Counter, "Bytes of contributions and their protocol.", "direction", ("sent", "received")
    ),
    Series("exchange_duration_seconds", Histogram, "Duration of the exchanges with a partner."),
    Series("inner_steps_total", Counter, "Inner steps done by this process."),
    Series("tokens_total", Counter, "Tokens trained on by this process."),
    Series("round", Gauge, "Rounds completed, counted by the swarm."),
    Series("swarm_members", Gauge, "Live members in the directory, this peer included."),
    Series("train_loss", Gauge, "Mean training loss of the last inner phase, nats a token."),
    Series("val_loss", Gauge, "Last validation loss, nats a token."),
    Series("learning_rate", Gauge, "Learning rate of the last inner step."),
    Series("grad_norm", Gauge, "Gradient norm of the last inner step, before clipping."),
    Series("pair_distance", Gauge, "Distance of the two contributions of the last merge, relative to this peer's own."),
    Series("last_merge_timestamp_seconds", Gauge, "Unix time of the last merge."),
    Series("build_info", Gauge, "1; the labels say what runs here."),
)


class Metrics:
    """The series of one peer, in a registry of their own. ``metrics["round"]`` is a prometheus_client object."""

    def __init__(self, **build: str) -> None:
        self.registry = CollectorRegistry()
        self._series: dict[str, Any] = {}
        for row in TABLE:
            labels = [row.label] if row.label else []
            if row.name == "build_info":
                labels = ["version", *build]
            name = (PREFIX + row.name).removesuffix("_total") if row.kind is Counter else PREFIX + row.name
            extra: dict[str, Any] = {"buckets": SECONDS} if row.kind is Histogram else {}
            series = row.kind(name, row.help, labels, registry=self.registry, **extra)
            for value in row.values:
                series.labels(value)
            self._series[row.name] = series
        self["build_info"].labels(__version__, *build.values()).set(1)

    def __getitem__(self, name: str) -> Any:
        return self._series[name]

    def serve(self, host: str, port: int | None) -> tuple[str, Callable[[], None]]:
        """Serve over http; returns ``host:port`` and a function that stops it.

        With no ``port``: the default one, or any free one when that is taken.
        """
        try:
            server, thread = start_http_server(DEFAULT_PORT if port is None else port, host, self.registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"peer.metrics.host {host}: {error.strerror}; it must be an address of this machine"
                ) from None
            if port is None:
                return self.serve(host, 0)
            raise UserError(
                f"port occupied: peer.metrics {host}:{port}: {error.strerror}; choose another peer.metrics.port"
            ) from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(5)

        return f"{host}:{server.server_port}", stop


class PhaseClock:
    """Splits the time since its creation into phases, without gaps: what is outside every phase is ``apply``.

    ``synchronize`` waits for the accelerator, so that a phase ends when its work has ended.
    """

    def __init__(self, metrics: Metrics, synchronize: Callable[[], None]) -> None:
        self._metrics, self._synchronize = metrics, synchronize
        self.totals = dict.fromkeys(PHASES, 0.0)
        self._phase = "apply"
        metrics["phase_info"].labels("apply").set(1)
        self._since = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._synchronize()
            self._enter(outer)

    def idle_share(self) -> float:
        """Share of all time spent waiting for a partner or for its tensor."""
        self._book()
        total = sum(self.totals.values())
        return sum(self.totals[phase] for phase in IDLE) / total if total else 0.0

    def _enter(self, phase: str) -> None:
        self._book()
        self._metrics["phase_info"].labels(self._phase).set(0)
        self._metrics["phase_info"].labels(phase).set(1)
        self._phase = phase

    def _book(self) -> None:
        now = time.monotonic()
        self.totals[self._phase] += now - self._since
        self._metrics["phase_seconds_total"].labels(self._phase).inc(now - self._since)
        self._since = now
