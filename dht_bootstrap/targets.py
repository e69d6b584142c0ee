"""``/targets``: the peers that Prometheus can scrape, as its http_sd wants them."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address
from typing import Any

from dht_bootstrap.history import RunHistory
from peer.p2p.addresses import is_circuit
from peer.swarm.directory.records import MemberRecord

HOST_OF_ADDRESS = re.compile(r"^/(?:ip4|dns4|dns)/([A-Za-z0-9.-]+)/")
ADDRESS = re.compile(r"^([A-Za-z0-9.-]{1,100}):(\d{1,5})$")


def targets(runs: dict[str, RunHistory]) -> list[dict[str, Any]]:
    """All live peers with an endpoint that others can reach, each with its labels."""
    return [
        {"targets": [target], "labels": {"peer": peer.record.name, "peer_id": peer_id, "run": name}}
        for name, run in sorted(runs.items())
        for peer_id, peer in sorted(run.live().items())
        if (target := target_of(peer.record)) is not None
    ]


def target_of(record: MemberRecord) -> str | None:
    """``host:port`` of a peer's metrics; ``None`` when they are for its own machine only, or when all that is
    known is the relay by which it is reached: then the swarm's series have what its record says.

    Where it listens on all addresses, its host is that of its first address that is not loopback. Loopback itself is
    right only in a swarm on one machine.
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
