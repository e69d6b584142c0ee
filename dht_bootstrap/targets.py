"""``/targets``: the peers that Prometheus can scrape, for its http_sd.

Whoever wrote a record chose what it says. So Prometheus is sent to a public address of the peer itself, or into a
network that the operator has named; never to a name, which may lead anywhere by the time it is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import Any

from dht_bootstrap.history import RunHistory
from peer.p2p.addresses import is_circuit, tcp_of
from peer.swarm.directory.records import MemberRecord

LOOPBACK = IPv4Network("127.0.0.0/8")
LOWEST_PORT = 1024  # below are services of a system
ENDPOINT = re.compile(r"([0-9.]{7,15}):([0-9]{1,5})")
Networks = Collection[IPv4Network]


def default_networks(host: str) -> Networks:
    """Of a node that listens on ``host``: loopback when its swarm can only be on this machine."""
    return (LOOPBACK,) if IPv4Address(host).is_loopback else ()


def targets(runs: dict[str, RunHistory], networks: Networks) -> list[dict[str, Any]]:
    """All live peers with an endpoint that may be scraped, each with its labels."""
    return [
        {"targets": [target], "labels": {"peer": peer.record.name, "peer_id": peer_id, "run": name}}
        for name, run in sorted(runs.items())
        for peer_id, peer in sorted(run.live().items())
        if (target := target_of(peer.record, networks)) is not None
    ]


def target_of(record: MemberRecord, networks: Networks) -> str | None:
    """``host:port`` of a peer's metrics; ``None`` when it has none that Prometheus may or can be sent to.

    Its host is a public address of the record itself, or in one of ``networks``. For a peer that listens on all
    addresses it is the first such address of the record, unless relays are in front of it.
    """
    found = ENDPOINT.fullmatch(record.metrics or "")
    if found is None or not LOWEST_PORT <= int(found[2]) < 2**16:
        return None
    own = [host for place in map(tcp_of, record.addresses) if place and (host := _ipv4(place[0]))]
    host = _ipv4(found[1])
    hosts = [host] if host else []
    if host and host.is_unspecified:
        hosts = [] if any(map(is_circuit, record.addresses[:1])) else own
    return next((f"{it}:{int(found[2])}" for it in hosts if _may_be_scraped(it, own, networks)), None)


def _may_be_scraped(host: IPv4Address, own: Collection[IPv4Address], networks: Networks) -> bool:
    if host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved:
        return False  # a cloud's metadata service is link-local
    if host.is_loopback and not all(it.is_loopback for it in own):
        return False  # loopback of another machine
    return any(host in network for network in networks) or (host in own and host.is_global)


def _ipv4(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except AddressValueError:
        return None
