"""The system calls that make a host: a network namespace with one TUN device.

Namespaces and devices have no name in the system: they end with the process that holds them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8916, 0x891C, 0x8922, 0x8913, 0x8914
IFF_UP = 0x1
PR_SET_PDEATHSIG = 1
DEVICE, MTU = "lab0", 9000

_libc = ctypes.CDLL(None, use_errno=True)


def possible() -> str:
    """The reason why this machine cannot run a laboratory; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


def die_with_parent(signal: int) -> None:
    """Receive ``signal`` when the parent process ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal))


def make_host(address: str, netmask: str) -> tuple[int, int]:
    """Make a namespace with its device up; returns the file descriptors of the namespace and of the device."""
    made: list[tuple[int, int]] = []

    def make() -> None:
        _check(_libc.unshare(CLONE_NEWNET))  # of this thread only
        namespace = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _set(control, SIOCSIFADDR, DEVICE, _in_addr(address))
            _set(control, SIOCSIFNETMASK, DEVICE, _in_addr(netmask))
            _set(control, SIOCSIFMTU, DEVICE, struct.pack("i", MTU))
            for name in ("lo", DEVICE):
                flags = struct.unpack_from("h", _set(control, SIOCGIFFLAGS, name, b""), 16)[0]
                _set(control, SIOCSIFFLAGS, name, struct.pack("h", flags | IFF_UP))
        made.append((namespace, device))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise OSError("could not make a host; see the error above")
    return made[0]


def _set(control: socket.socket, request: int, name: str, value: bytes) -> bytes:
    return fcntl.ioctl(control, request, struct.pack("16s", name.encode()) + value.ljust(24, b"\0"))


def _in_addr(address: str) -> bytes:
    return struct.pack("hh", socket.AF_INET, 0) + socket.inet_aton(address)


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
