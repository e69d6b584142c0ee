"""Two hosts on a link that only the kernel limits: veth between two namespaces, tbf at both ends, no delay.

The delay line of lab.py can do more, but it takes a core that a measurement of goodput needs. Requires iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

NETWORK = "10.78.0"
QUEUE = "burst 64kb latency 100ms"


class Wire:
    """Hosts 0 and 1 of :func:`wire`."""

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"{NETWORK}.{host + 1}"

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"wire-{os.getpid()}-{host}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``arguments`` on ``host``."""
        return ["ip", "netns", "exec", self.namespace(host), *arguments]


@contextmanager
def wire(mbit: float) -> Iterator[Wire]:
    """Hosts 0 and 1 with a link of ``mbit`` in each direction."""
    it = Wire()
    with ExitStack() as stack:
        for host in (0, 1):
            _run(f"ip netns add {it.namespace(host)}")
            stack.callback(_run, f"ip netns del {it.namespace(host)}")
        ends = [f"netns {it.namespace(host)}" for host in (0, 1)]
        _run(f"ip link add wire0 {ends[0]} type veth peer name wire1 {ends[1]}")
        for host in (0, 1):
            device, inside = f"wire{host}", f"ip -n {it.namespace(host)}"
            _run(f"{inside} addr add {it.address(host)}/24 dev {device}")
            _run(f"{inside} link set lo up")
            _run(f"{inside} link set {device} up")
            _run(f"tc -n {it.namespace(host)} qdisc add dev {device} root tbf rate {mbit}mbit {QUEUE}")
        yield it


def _run(words: str) -> None:
    subprocess.run(words.split(), timeout=10, check=True)
