"""Goodput of a swap on lines of several kinds, as shares of the line, of plain TCP and of TLS. One run, ratios.

After each swap over direct connections the same bytes go over the p2p stream as a swap; over one bare p2p stream and
over four; over plain TCP and over TLS with as many connections as the swap had; and over one TCP connection. The lines:
the laboratory's delay line, a process on the same cores; links that only the kernel limits; loopback. On one link a
small tcp_wmem bounds each connection, as a stock kernel does at higher rates.

python -m tests.benchmarks.wan_goodput [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.common import finish, options
from tests.netlab.lab import ROOT, Lab
from tests.netlab.plan import Access, Path_, Plan
from tests.netlab.wire import Wire, wire

NUMEL, QUICK_NUMEL = 16 * 2**20, 4 * 2**20  # 64 and 16 MiB of fp32
SMALL_WMEM = "4096 16384 524288"  # bytes: 42 Mbit/s a connection at 100 ms
PATIENCE = 1500  # seconds for a line
GIB = 2**30


@dataclass(frozen=True)
class Line:
    """``mbit``: each way; ``hosts``: makes them, ``None`` for loopback. ``times``: as large a swap as elsewhere."""

    mbit: float | None
    hosts: Callable[[], Any] | None = None

    @property
    def times(self) -> int:
        """So that a swap takes seconds, as those of real models do, and not a few round trips."""
        return 4 if self.mbit is None or self.mbit > 100 else 1


def lab(mbit: float, rtt_ms: float, loss: float = 0.0, wmem: str = "") -> Line:
    @contextmanager
    def hosts() -> Iterator[Lab]:
        path = Path_(rtt_ms=rtt_ms, loss=loss)
        with Lab(Plan(access=Access(up_mbit=mbit, down_mbit=mbit), path=path), 2) as it:
            for host in (0, 1) if wmem else ():
                subprocess.run(it.command(host, ["sysctl", "-qw", f"net.ipv4.tcp_wmem={wmem}"]), check=True, timeout=10)
            yield it

    return Line(mbit, hosts)


LINES = {
    "link_100mbit": lab(100, 20),
    "link_100mbit_lossy": lab(100, 20, loss=0.001),
    "link_100mbit_100ms_small_wmem": lab(100, 100, wmem=SMALL_WMEM),
    "link_200mbit_100ms": lab(200, 100),
    "link_1gbit_10ms": lab(1000, 10),
    "kernel_100mbit": Line(100, lambda: wire(100)),
    "kernel_1gbit": Line(1000, lambda: wire(1000)),
    "loopback": Line(None),
}


def moved(hosts: Lab | Wire | None, numel: int, count: int) -> dict[str, Any]:
    """The figures of :class:`tests.benchmarks.goodput_ends.Mover` between two hosts."""

    def command(host: int, *arguments: str) -> list[str]:
        words = [sys.executable, "-m", "tests.benchmarks.goodput_ends", *arguments]
        return words if hosts is None else hosts.command(host, words)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = ["127.0.0.1"] * 2 if hosts is None else [hosts.address(0), hosts.address(1)]
        server = subprocess.Popen(
            command(0, "serve", addresses[0], str(folder / "a")),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(server)
        stack.callback(server.terminate)
        assert server.stdout is not None
        told = [*server.stdout.readline().split(), str(numel), str(count)]
        client = command(1, "move", addresses[1], str(folder / "b"), *told)
        done = subprocess.run(client, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def measure(*, quick: bool) -> dict[str, Any]:
    """``goodput_share``: of the line's rate, and on loopback of TLS with as many connections. ``versus_tcp``: a swap's
    goodput over that of plain TCP with as many connections; ``versus_stream``: over that of a swap over the p2p stream.
    """
    numel, count = (QUICK_NUMEL, 1) if quick else (NUMEL, 5)
    found: dict[str, Any] = {"goodput_share": {}, "versus_tcp": {}, "versus_stream": {}, "connections": {}}
    for name, line in LINES.items():
        print(name, file=sys.stderr, flush=True)
        if line.hosts is None:
            figures = moved(None, numel * line.times, 3 if quick else 9)
        else:
            with line.hosts() as hosts:
                figures = moved(hosts, numel * line.times, count)
        seconds = figures["seconds"]
        found["connections"][name] = figures["connections"]
        found["versus_tcp"][name] = _ratio(seconds["tcp"], seconds["swap"])
        found["versus_stream"][name] = _ratio(seconds["stream"], seconds["swap"])
        if line.mbit is not None:
            for kind, each in seconds.items():
                suffix = "" if kind == "swap" else f"_{kind}"
                found["goodput_share"][f"{name}{suffix}"] = 32e-6 * numel * line.times / median(each) / line.mbit
        else:
            found["goodput_share"][name] = _ratio(seconds["tls"], seconds["swap"])
            gib = 2 * 4 * numel * line.times / GIB  # both directions; of one side, and the other one takes as much
            found["processor_seconds_a_gib"] = {
                kind: 2 * median(each) / gib for kind, each in figures["processor"].items()
            }
    return found


def _ratio(reference: list[float], swap: list[float]) -> float:
    return median(one / other for one, other in zip(reference, swap, strict=True))


def main() -> None:
    args = options("the goodput of a swap")
    found = measure(quick=args.quick)
    share, tcp = found["goodput_share"], found["versus_tcp"]
    words = (
        f"a swap gets {share['link_100mbit']:.0%} of 100 Mbit/s at 20 ms ({tcp['link_100mbit']:.0%} of TCP), "
        f"{share['link_200mbit_100ms']:.0%} of 200 Mbit/s at 100 ms ({tcp['link_200mbit_100ms']:.0%}), and "
        f"{share['loopback']:.0%} of TLS on loopback"
    )
    goals = {
        "0.92 of 100 Mbit/s at 20 ms": share["link_100mbit"] >= 0.92,
        "0.90 of 200 Mbit/s at 100 ms": share["link_200mbit_100ms"] >= 0.90,
        "0.6 of TLS on loopback": share["loopback"] >= 0.6,
    }
    finish("wan_goodput", found, words, args, goals)


if __name__ == "__main__":
    main()
