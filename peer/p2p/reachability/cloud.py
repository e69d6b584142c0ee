"""The public address and port of a container in a cloud that remaps ports, from the cloud's environment variables.

Such a cloud maps a TCP port of the container to another port of a shared public address, and says which:
    RunPod   RUNPOD_PUBLIC_IP=203.0.113.7  RUNPOD_TCP_PORT_31338=10030
    Vast.ai  PUBLIC_IPADDR=203.0.113.7     VAST_TCP_PORT_31338=41234
Sources: docs.runpod.io, "Expose ports"; docs.vast.ai, "Networking & Ports". By dialling back nobody finds that port.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from peer.logs import get_logger
from peer.p2p.addresses import is_private, tcp_place

log = get_logger("cloud")

CLOUDS = (("RunPod", "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"), ("Vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_"))
LISTED_PORTS = 4  # mapped ports that a line names
SSH_PORT = "22"
LONGEST_VALUE = 40  # characters of a wrong value that a line quotes


@dataclass(frozen=True)
class CloudPort:
    """What a cloud says of a port. ``address``: its public multiaddr. When it is empty, ``advice`` says what to do."""

    text: str
    address: str = ""
    advice: str = ""


def announced(host: str, port: int, given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The multiaddrs to announce for a node that listens on ``host`` and TCP ``port``, with one line in the log.

    ``given`` by the user are left as they are. Empty: nothing is known, so reachability is found out as elsewhere.
    """
    found = None if given else find(host, port)
    if found is None:
        return given
    if found.address:
        log.info("%s", found.text)
        return (found.address,)
    log.warning("%s; %s", found.text, found.advice)
    return ()


def find(host: str, port: int) -> CloudPort | None:
    """What the environment says of TCP ``port``; ``None`` outside of such a cloud, and for a node on loopback."""
    if host.startswith("127."):
        return None
    for cloud, address, prefix in CLOUDS:
        if any(name.startswith(prefix) for name in os.environ):
            return _mapped(cloud, address, prefix, port)
    return None


def _mapped(cloud: str, address: str, prefix: str, port: int) -> CloudPort:
    variable = f"{prefix}{port}"
    if variable not in os.environ:
        inside = [it for name in os.environ if (it := name.removeprefix(prefix)) != name and _is_port(it)]
        some = ", ".join(sorted(it for it in inside if it != SSH_PORT)[:LISTED_PORTS])
        said = f"{cloud} maps no port to {f'TCP {port}' if port else 'a port that is chosen at the start'}"
        ready = f", or choose one that is mapped already ({some})" if some else ""
        return CloudPort(said, advice=f"map the port that is in the settings (31338 for example){ready}")
    host, outside = os.environ.get(address, ""), os.environ[variable]
    if not _is_public(host):
        said = f"{cloud}'s {address} is ignored: {host[:LONGEST_VALUE]!r} is no public IPv4 address"
    elif not _is_port(outside):
        said = f"{cloud}'s {variable} is ignored: {outside[:LONGEST_VALUE]!r} is no TCP port"
    else:
        place = tcp_place(host, int(outside))
        return CloudPort(f"{cloud} maps {place} to TCP {port} of this container: announced", place)
    return CloudPort(said, advice="announce the right one in the settings, as /ip4/ADDRESS/tcp/PORT")


def _is_public(text: str) -> bool:
    """An IPv4 address, which is what a node listens on, that others can reach."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    nowhere = address.is_multicast or address.is_reserved or address in ipaddress.ip_network("0.0.0.0/8")
    return not nowhere and not is_private(text)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536
