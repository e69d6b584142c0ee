"""Multiaddrs as text: their owner, host and port, and whether they go through a relay; and a port of this machine.

    /ip4/203.0.113.7/tcp/31337/p2p/QmOwner                              direct
    /ip4/203.0.113.7/tcp/31337/p2p/QmRelay/p2p-circuit/p2p/QmOwner      through a relay
Records hold them without the owner's id at the end.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache

CIRCUIT = "/p2p-circuit"
LONGEST = 128  # characters of an address in a record
MOST_ADDRESSES = 8  # in a record
_BACKLOG = 256
_OWNER = re.compile(r"/p2p/([1-9A-HJ-NP-Za-km-z]+)$")
_PRIVATE_IPV4 = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16")
_PRIVATE_NETWORKS = [ipaddress.ip_network(it) for it in (*_PRIVATE_IPV4, "fc00::/7", "fe80::/10")]
_DIRECT = re.compile(r"/(?:ip4/([0-9.]+)|ip6/([0-9a-fA-F:.]+))/tcp/(\d{1,5})$")


def owner_of(address: str) -> str:
    """The peer id at the end; empty when there is none."""
    found = _OWNER.search(address)
    return found[1] if found else ""


def place_of(address: str) -> str:
    """The address without its owner's id."""
    return _OWNER.sub("", address)


def is_circuit(address: str) -> bool:
    """Does it go through a relay?"""
    return CIRCUIT in address


def relay_of(address: str) -> str:
    """The id of the relay through which it goes; empty for a direct one."""
    return owner_of(address.partition(CIRCUIT)[0]) if is_circuit(address) else ""


def direct_ways(addresses: Sequence[str]) -> Sequence[str]:
    """Without those through relays, when the first one is direct: a relay might answer first, and would carry what two
    peers of one local network exchange.
    """
    direct = [address for address in addresses if not is_circuit(address)]
    return direct if direct[:1] == list(addresses[:1]) else addresses


@lru_cache(1024)  # who looks for a relay asks it of all members again and again
def tcp_of(address: str) -> tuple[str, int] | None:
    """Host and port, as numbers, of a direct address; ``None`` for names, circuits and other transports."""
    found = _DIRECT.match(place_of(address))
    if found is None:
        return None
    try:
        host = str(ipaddress.ip_address(found[1] or found[2]))
    except ValueError:
        return None
    port = int(found[3])
    return (host, port) if 0 < port < 65536 else None


def tcp_place(host: str, port: int) -> str:
    """The multiaddr of a host (IP address) and a port."""
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there alone; raises ``OSError``. Two p2p daemons would share the port (SO_REUSEPORT)."""
    taken = socket.socket()
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier owner may linger
        taken.bind((host, port))
        taken.listen(_BACKLOG)
    except OSError:
        taken.close()
        raise
    return taken


def is_loopback(address: str) -> bool:
    """Does it lead to this machine only?"""
    found = tcp_of(address)
    return found is not None and ipaddress.ip_address(found[0]).is_loopback


@lru_cache(1024)
def is_private(host: str) -> bool:
    """Is it an IP address that other networks do not route? (Python's ``is_private`` has documentation ranges too.)"""
    address = ipaddress.ip_address(host)
    return address.is_loopback or any(address in it for it in _PRIVATE_NETWORKS)


def is_of_private_network(address: str) -> bool:
    """Is it a direct address with a private host?"""
    return is_private((tcp_of(address) or ("0.0.0.0",))[0])


def most_public(addresses: Sequence[str]) -> str:
    """The first direct one that is not of a private network, or else the first."""
    return min(addresses, key=lambda it: (is_circuit(it), is_of_private_network(it)))


def for_record(addresses: Iterable[str]) -> tuple[str, ...]:
    """Those that a record holds, without ids: short enough, and loopback ones only when there are no others."""
    places = [place for place in map(place_of, addresses) if len(place) <= LONGEST]
    return tuple([place for place in places if not is_loopback(place)] or places)[:MOST_ADDRESSES]
