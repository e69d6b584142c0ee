"""``/metrics``: series made of the records in the DHT.

The records show peers behind NAT too. telemetry/series.py has the names of the series.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dht_bootstrap.findings import findings
from dht_bootstrap.history import FORGET, PeerHistory, RunHistory
from dht_bootstrap.watch import Watch
from peer import __version__
from peer.telemetry.series import OF_BOOTSTRAP, PREFIX, STATES, SWARM_EVENTS, WARNINGS

SeriesSample = tuple[str, tuple[str, ...], float]  # series, its labels' values, value


class SwarmCollector(Collector):
    """Makes the series, for all who scrape between two looks at the directory (monitor.py)."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families = {
            row.name: (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
                PREFIX + row.name, row.help, labels=row.labels
            )
            for row in OF_BOOTSTRAP
        }
        for name, labels, value in self._samples():
            families[name].add_metric(labels, value)
        yield from families.values()

    def _samples(self) -> Iterator[SeriesSample]:
        watch, now = self._watch, time.time()
        yield "bootstrap_info", (__version__,), 1.0
        yield "dht_connected_peers", (), float(watch.connected)
        yield "dht_read_seconds", (), watch.read_seconds
        for result, count in watch.reads.items():
            yield "dht_reads_total", (result,), float(count)
        with watch.lock:
            runs = {name: run for name, run in watch.runs.items() if not run.ended_at or run.ended_at > now - FORGET}
            for name, run in runs.items():
                yield from _of_run(name, run)


def _of_run(name: str, run: RunHistory) -> Iterator[SeriesSample]:
    live = run.live()
    states = Counter([peer.state for peer in run.peers.values()] + [record.state for record in run.unnamed])
    for state in STATES:
        yield "swarm_peers", (name, state), float(states[state])
    yield "swarm_peers_unnamed", (name,), float(len(run.unnamed))
    for event in SWARM_EVENTS:
        yield "swarm_events_total", (name, event), float(run.event_counts[event])
    warned = Counter(found.kind for found in findings(run))
    for warning in WARNINGS:
        yield "swarm_warnings", (name, warning), float(warned[warning])
    for peer_id, peer in live.items():
        yield from _of_peer((name, peer.record.name, peer_id), peer, run.refusals.total[peer_id], run)


def _of_peer(labels: tuple[str, str, str], peer: PeerHistory, refused: int, run: RunHistory) -> Iterator[SeriesSample]:
    record, report = peer.record, peer.record.report
    values: dict[str, float | None] = {
        "idle_seconds_total": report.idle_seconds,
        "seconds_total": report.seconds,
        "step": record.step,
        "round": record.round,
        "tokens_total": report.tokens,
        "tokens_per_second": record.tokens_per_second,
        "train_loss": report.train_loss,
        "val_loss": report.val_loss,
        "members": report.members,
        "refusals_total": refused,
        "last_seen_timestamp_seconds": peer.written,
        "last_merge_timestamp_seconds": None if report.merged_ago is None else peer.written - report.merged_ago,
    }
    for key, value in values.items():
        if value is not None and math.isfinite(value):
            yield f"swarm_peer_{key}", labels, float(value)
    partner = run.peers.get(peer.partners[-1]) if peer.partners else None
    words = (report.version, record.config, partner.record.name if partner else "")
    yield "swarm_peer_info", (*labels, *words), 1.0
