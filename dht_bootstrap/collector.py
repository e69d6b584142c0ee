"""What Prometheus reads: ``/metrics``, series made of the records in the DHT, and ``/targets``, peers to scrape.

The records show peers behind NAT too. telemetry/series.py has the names of the series.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from ipaddress import AddressValueError, IPv4Address
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dht_bootstrap.findings import findings
from dht_bootstrap.history import PeerHistory, RunHistory
from peer import __version__
from peer.p2p.addresses import is_circuit
from peer.swarm.directory.records import MemberRecord
from peer.telemetry.series import OF_BOOTSTRAP, PREFIX, STATES, SWARM_EVENTS, WARNINGS

if TYPE_CHECKING:
    from dht_bootstrap.watch import Watch

HOST_OF_ADDRESS = re.compile(r"^/(?:ip4|dns4|dns)/([A-Za-z0-9.-]+)/")
ADDRESS = re.compile(r"^([A-Za-z0-9.-]{1,100}):(\d{1,5})$")
SeriesSample = tuple[str, tuple[str, ...], float]  # series, its labels' values, value


class SwarmCollector(Collector):
    """Makes the series at every scrape."""

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
        watch = self._watch
        yield "bootstrap_info", (__version__,), 1.0
        yield "dht_connected_peers", (), float(watch.connected)
        yield "dht_read_seconds", (), watch.read_seconds
        for result, count in watch.reads.items():
            yield "dht_reads_total", (result,), float(count)
        with watch.lock:
            for name, run in watch.runs.items():
                yield from _of_run(name, run)


def _of_run(name: str, run: RunHistory) -> Iterator[SeriesSample]:
    live, refused = run.live(), run.refusals()
    states = Counter(peer.state for peer in run.peers.values())
    for state in STATES:
        yield "swarm_peers", (name, state), float(states[state])
    for event in SWARM_EVENTS:
        yield "swarm_events_total", (name, event), float(run.event_counts[event])
    warned = Counter(found.kind for found in findings(run))
    for warning in WARNINGS:
        yield "swarm_warnings", (name, warning), float(warned[warning])
    for peer_id, peer in live.items():
        yield from _of_peer((name, peer.record.name, peer_id), peer, refused[peer_id], run)


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
        "refusals": refused,
        "last_seen_timestamp_seconds": peer.written,
        "last_merge_timestamp_seconds": None if report.merged_ago is None else peer.written - report.merged_ago,
    }
    for key, value in values.items():
        if value is not None:
            yield f"swarm_peer_{key}", labels, float(value)
    partner = run.peers.get(peer.partners[-1]) if peer.partners else None
    words = (report.version, record.config, partner.record.name if partner else "")
    yield "swarm_peer_info", (*labels, *words), 1.0


def targets(runs: dict[str, RunHistory]) -> list[dict[str, Any]]:
    """All live peers with an endpoint that others can reach, each with its labels."""
    return [
        {"targets": [target], "labels": {"peer": peer.record.name, "peer_id": peer_id, "run": name}}
        for name, run in sorted(runs.items())
        for peer_id, peer in sorted(run.live().items())
        if (target := target_of(peer.record)) is not None
    ]


def target_of(record: MemberRecord) -> str | None:
    """``host:port`` of a peer's metrics; ``None`` when only its own machine can read them or only its relay is known.

    For a peer that listens on all addresses, the host is that of its first address that is not loopback. Loopback
    itself is right only in a swarm on one machine.
    """
    found = ADDRESS.match(record.metrics or "")
    if found is None or not 0 < int(found[2]) < 2**16:
        return None
    host, port = found.groups()
    hosts = [match[1] for match in map(HOST_OF_ADDRESS.match, record.addresses) if match]
    outside = [it for it in hosts if not _is_loopback(it)]
    if host == "0.0.0.0":
        if any(map(is_circuit, record.addresses)):
            return None
        host = (outside or ["127.0.0.1"])[0]
    if _is_loopback(host) and outside:
        return None
    return f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return IPv4Address(host).is_loopback
    except AddressValueError:
        return host == "localhost"
