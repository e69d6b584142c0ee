"""A laboratory for a test or a benchmark: ``with Lab(load("home"), 8) as lab: lab.command(3, [...])``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.netlab.plan import Plan
from tests.netlab.tun import DEVICE

ROOT = Path(__file__).parents[2]


class Lab:
    """``hosts`` hosts, numbered from 0. They run only what :meth:`command` starts."""

    def __init__(self, plan: Plan, hosts: int) -> None:
        self.plan, self.hosts = plan, hosts

    def __enter__(self) -> Lab:
        self._line = subprocess.Popen(
            [sys.executable, "-m", "tests.netlab.line", self.plan.model_dump_json(), str(self.hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._line.stdout is not None
        said = self._line.stdout.readline()
        if not said:
            raise RuntimeError(f"the delay line ended with {self._line.wait(10)}")
        self._namespaces: list[int] = json.loads(said)["namespaces"]
        return self

    def __exit__(self, *error: object) -> None:
        assert self._line.stdin is not None and self._line.stdout is not None
        self._line.stdin.close()
        try:
            self._line.wait(5)
        except subprocess.TimeoutExpired:
            self._line.kill()
            self._line.wait(5)
        self._line.stdout.close()

    def address(self, host: int) -> str:
        """The host's IPv4 address as the other hosts see it."""
        return self.plan.address(host)

    def inside(self, host: int) -> str:
        """The IPv4 address of the host's device. Behind a NAT it differs from :meth:`address`."""
        return self.plan.inside(host)

    def namespace(self, host: int) -> str:
        """The file of the host's network namespace."""
        return f"/proc/{self._line.pid}/fd/{self._namespaces[host]}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``arguments`` on ``host``."""
        return ["nsenter", f"--net={self.namespace(host)}", *arguments]

    def sent(self, *hosts: int) -> int:
        """Bytes that these hosts have sent so far, summed, with IP and TCP headers."""
        total = 0
        for host in hosts:
            command = self.command(host, ["cat", "/proc/net/dev"])
            text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            total += next(int(line.split()[9]) for line in text.splitlines() if line.strip().startswith(f"{DEVICE}:"))
        return total

    def set_access(self, host: int, up_mbit: float | None, down_mbit: float | None) -> None:
        """Change a host's rates. ``None``: no limit."""
        self._order({"host": host, "up_mbit": up_mbit, "down_mbit": down_mbit})

    def cut(self, *hosts: int) -> None:
        """Disconnect these hosts and reconnect all others."""
        self.part(*([host] for host in hosts))

    def part(self, *islands: Sequence[int]) -> None:
        """Hosts reach only hosts that share an island with them. The hosts on no island reach one another."""
        self._order({"islands": [list(hosts) for hosts in islands]})

    def _order(self, order: dict[str, object]) -> None:
        assert self._line.stdin is not None
        self._line.stdin.write(json.dumps(order) + "\n")
        self._line.stdin.flush()
