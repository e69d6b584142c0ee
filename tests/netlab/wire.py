"""Two hosts on a link that the kernel alone limits: veth between two namespaces, tbf at both ends, no delay.

The delay line of lab.py can do more, but needs a core that a measurement of goodput wants. Needs iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

NETWORK = "10.78.0"
QUEUE = "burst 64kb latency 100ms"


class Wire:
    """``with Wire(100) as wire: wire.command(1, [...])``; hosts 0 and 1, ``mbit`` in both directions."""

    def __init__(self, mbit: float) -> None:
        self._mbit = mbit

    def __enter__(self) -> Wire:
        self._stack = ExitStack()
        try:
            for host in (0, 1):
                _ip(f"netns add {self._name(host)}")
                self._stack.callback(_ip, f"netns del {self._name(host)}")
            ends = [f"netns {self._name(host)}" for host in (0, 1)]
            _ip(f"link add wire0 {ends[0]} type veth peer name wire1 {ends[1]}")
            for host in (0, 1):
                device, inside = f"wire{host}", f"-n {self._name(host)}"
                _ip(f"{inside} addr add {self.address(host)}/24 dev {device}")
                _ip(f"{inside} link set lo up")
                _ip(f"{inside} link set {device} up")
                limit = f"tc qdisc add dev {device} root tbf rate {self._mbit}mbit {QUEUE}"
                subprocess.run(self.command(host, limit.split()), timeout=10, check=True)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"{NETWORK}.{host + 1}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``arguments`` on ``host``."""
        return ["ip", "netns", "exec", self._name(host), *arguments]

    def _name(self, host: int) -> str:
        return f"wire-{os.getpid()}-{host}"


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], timeout=10, check=True)
