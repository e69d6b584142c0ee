"""A NAT for one host, as in home routers. It translates address and port. Only a remote that the host has sent to may
send to the host. (Runs in the delay line: no iptables, no kernel module.)

``cone``: an inside port has one outside port for all destinations. Two peers behind such NATs can punch holes.
``symmetric``: an inside port has a different outside port for each destination. Hole punching fails.
``forward``: all ports are forwarded to the host unchanged, as for a cloud machine.
Mappings never expire: a laboratory lives for minutes.
"""

from __future__ import annotations

import socket
from itertools import count

TCP, UDP = 6, 17
CHECKSUM = {TCP: 16, UDP: 6}  # its offset in the header
FIRST_PORT = 40001
Remote = tuple[bytes, int]


class Nat:
    """``inside``: the host's address; ``outside``: the NAT's address."""

    def __init__(self, inside: str, outside: str, kind: str) -> None:
        self._inside, self._outside = socket.inet_aton(inside), socket.inet_aton(outside)
        self._symmetric, self._forward = kind == "symmetric", kind == "forward"
        self._ports = count(FIRST_PORT)
        self._out: dict[tuple[int, int, Remote | None], int] = {}  # protocol, port inside, remote: port outside
        self._back: dict[tuple[int, int], int] = {}  # protocol, port outside: port inside
        self._spoken: set[tuple[int, int, Remote]] = set()  # protocol, port outside, remote

    def outward(self, packet: bytes) -> bytes | None:
        """Translate a packet from the host; ``None``: dropped."""
        head, protocol = (packet[0] & 15) * 4, packet[9]
        if protocol not in CHECKSUM:
            return None
        port = int.from_bytes(packet[head : head + 2], "big")
        if self._forward:
            return _rewritten(packet, 12, self._outside, head, port)
        remote = (packet[16:20], int.from_bytes(packet[head + 2 : head + 4], "big"))
        key = (protocol, port, remote if self._symmetric else None)
        if key not in self._out:
            self._out[key] = next(self._ports)
            self._back[protocol, self._out[key]] = port
        self._spoken.add((protocol, self._out[key], remote))
        return _rewritten(packet, 12, self._outside, head, self._out[key])

    def inward(self, packet: bytes) -> bytes | None:
        """Translate a packet from the network; ``None``: dropped, the host has not sent to that remote."""
        head, protocol = (packet[0] & 15) * 4, packet[9]
        remote = (packet[12:16], int.from_bytes(packet[head : head + 2], "big"))
        port = int.from_bytes(packet[head + 2 : head + 4], "big")
        if self._forward and protocol in CHECKSUM:
            return _rewritten(packet, 16, self._inside, head + 2, port)
        if (protocol, port, remote) not in self._spoken:
            return None
        return _rewritten(packet, 16, self._inside, head + 2, self._back[protocol, port])


def _rewritten(packet: bytes, address_at: int, address: bytes, port_at: int, port: int) -> bytes:
    """Replace an address and a port, and correct the checksums."""
    out = bytearray(packet)
    head, protocol = (packet[0] & 15) * 4, packet[9]
    before = packet[address_at : address_at + 4]
    out[address_at : address_at + 4] = address
    out[port_at : port_at + 2] = port.to_bytes(2, "big")
    _correct(out, 10, before, address)
    at = head + CHECKSUM[protocol]
    if protocol == TCP or packet[at : at + 2] != b"\0\0":  # in UDP it is optional
        _correct(out, at, before + packet[port_at : port_at + 2], address + port.to_bytes(2, "big"))
    return bytes(out)


def _correct(packet: bytearray, at: int, before: bytes, now: bytes) -> None:
    """Update a checksum after bytes that it covers have changed (RFC 1624)."""
    total = ~int.from_bytes(packet[at : at + 2], "big") & 0xFFFF
    for start in range(0, len(before), 2):
        total += ~int.from_bytes(before[start : start + 2], "big") & 0xFFFF
        total += int.from_bytes(now[start : start + 2], "big")
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    packet[at : at + 2] = (~total & 0xFFFF).to_bytes(2, "big")
