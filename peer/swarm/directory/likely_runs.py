"""Which of many runs are likely to be real: anybody can invent runs, and their members too. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from itertools import chain

from peer.p2p.addresses import tcp_of

PREFIXES = {4: 16, 6: 32}  # bits that name a network, by the version of an IP address


def networks_of(addresses: Iterable[str]) -> set[str]:
    """The networks of these multiaddrs; none for names and relays."""
    hosts = [ipaddress.ip_address(place[0]) for place in map(tcp_of, addresses) if place is not None]
    return {str(ipaddress.ip_network((it, PREFIXES[it.version]), strict=False)) for it in hosts}


def likeliest(
    runs: Mapping[str, Iterable[str]], networks: Mapping[str, Iterable[str]], count: int, followed: Container[str] = ()
) -> list[str]:
    """``count`` of the ``runs`` (ids of their members), of two alike the first one. Those with members that are
    connected from many ``networks`` (by id) come first: an id and a record cost nothing, an address does. Then those
    ``followed`` until now: else one address with more ids takes the place of a swarm in one network. Then those with
    many members. An id in several runs counts in none: a peer trains one.
    """
    times = Counter(chain.from_iterable(map(set, runs.values())))

    def weight(run: str) -> tuple[int, bool, int]:
        own = {it for it in runs[run] if times[it] == 1}
        return len({network for it in own for network in networks.get(it, ())}), run in followed, len(own)

    return sorted(runs, key=weight, reverse=True)[:count]
