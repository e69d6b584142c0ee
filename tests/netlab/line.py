"""The delay line: one process that holds all hosts and delays, limits or drops their packets.

python -m tests.netlab.line PLAN.json HOSTS
It prints one line of JSON, {"pid": ..., "namespaces": [fd, ...]}. Then it reads orders from stdin, one per line:
{"host": 0, "up_mbit": 1, "down_mbit": 1} changes an access link. {"islands": [[0], [1, 2]]} separates these hosts from
all hosts on other islands. {"islands": []} reconnects all hosts. A host may be on several islands.

A packet passes the sender's uplink, the path between two regions and the receiver's downlink. Each of the three that
has a rate is a queue. A queue sends one packet at a time and drops packets that arrive when it is full.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.netlab.nat import Nat
from tests.netlab.plan import Plan
from tests.netlab.tun import die_with_parent, make_host

PACKET = 65536


@dataclass
class Queue:
    """Packets leave at ``mbit``; ``None``: at once."""

    mbit: float | None
    limit: float  # seconds that a full queue takes to empty
    free: float = 0.0  # when the last packet will have left

    def leaves(self, now: float, size: int) -> float | None:
        """When a packet of ``size`` bytes that arrives now will have left; ``None``: dropped."""
        if self.mbit is None:
            return now
        takes = 8e-6 * size / self.mbit
        if self.free - now > max(self.limit, 2 * takes):
            return None
        self.free = max(self.free, now) + takes
        return self.free


@dataclass(order=True)
class Event:
    due: float
    number: int
    action: Callable[[float], None] = field(compare=False)


class Line:
    """All queues, and the packets in flight."""

    def __init__(self, plan: Plan, hosts: int) -> None:
        self._plan, limit = plan, plan.queue_ms / 1000
        self._up = [Queue(plan.access.up_mbit, limit) for _ in range(hosts)]
        self._down = [Queue(plan.access.down_mbit, limit) for _ in range(hosts)]
        self._paths: dict[str, Queue] = {}
        # Behind a NAT the netmask covers half of all addresses, the network's too: then no gateway is needed.
        masks = ["128.0.0.0" if host in plan.nat else "255.255.0.0" for host in range(hosts)]
        self._made = [make_host(plan.inside(host), mask) for host, mask in enumerate(masks)]
        self._hosts = {bytes(map(int, plan.address(host).split("."))): host for host in range(hosts)}
        self._nats = {host: Nat(plan.inside(host), plan.address(host), kind) for host, kind in plan.nat.items()}
        self._islands: dict[int, set[int]] = {}  # by host; a host that is missing here is on island 0
        self._events: list[Event] = []
        self._number = 0
        self._chance = random.Random(0)

    @property
    def namespaces(self) -> list[int]:
        return [namespace for namespace, _ in self._made]

    def run(self) -> None:
        """Carry packets until stdin ends."""
        devices = {device: host for host, (_, device) in enumerate(self._made)}
        orders, rest = sys.stdin.fileno(), b""
        while True:
            now = time.monotonic()
            while self._events and self._events[0].due <= now:
                event = heapq.heappop(self._events)
                event.action(max(event.due, now - 0.005))  # a late wake-up must not reduce the rate
            wait = max(0.0, self._events[0].due - time.monotonic()) if self._events else None
            ready, _, _ = select.select([*devices, orders], [], [], wait)
            for descriptor in ready:
                if descriptor != orders:
                    self._read(descriptor, devices[descriptor])
                elif not (said := os.read(orders, PACKET)):
                    return
                else:  # not readline: it may buffer further lines, for which select would not return again
                    *lines, rest = (rest + said).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))

    def _obey(self, order: dict[str, object]) -> None:
        if "islands" in order:
            islands: list[list[int]] = order["islands"]  # type: ignore[assignment]
            self._islands = {}
            for number, hosts in enumerate(islands, 1):
                for host in hosts:
                    self._islands.setdefault(host, set()).add(number)
        else:
            host = int(order["host"])  # type: ignore[call-overload]
            self._up[host].mbit, self._down[host].mbit = order["up_mbit"], order["down_mbit"]  # type: ignore[assignment]

    def _read(self, device: int, source: int) -> None:
        for _ in range(64):
            try:
                packet: bytes | None = os.read(device, PACKET)
            except BlockingIOError:
                return
            if packet and packet[0] >> 4 == 4 and source in self._nats:
                packet = self._nats[source].outward(packet)
            target = self._hosts.get(packet[16:20]) if packet else None  # IPv4 destination
            if packet and target is not None and packet[0] >> 4 == 4:
                self._enter(packet, source, target)

    def _enter(self, packet: bytes, source: int, target: int) -> None:
        name, path = self._plan.path_of(source, target)
        if self._parted(source, target) or self._chance.random() < path.loss:
            return
        queue = self._paths.setdefault(name, Queue(path.mbit, self._plan.queue_ms / 1000))
        size = len(packet)

        def after(queue: Queue, wait: float, then: Callable[[float], None]) -> Callable[[float], None]:
            def step(now: float) -> None:
                left = queue.leaves(now, size)
                if left is not None:
                    self._at(left + wait, then)

            return step

        deliver = after(self._down[target], 0.0, lambda _: self._deliver(packet, source, target))
        after(self._up[source], 0.0, after(queue, path.rtt_ms / 2000, deliver))(time.monotonic())

    def _parted(self, one: int, two: int) -> bool:
        return self._islands.get(one, {0}).isdisjoint(self._islands.get(two, {0}))

    def _deliver(self, packet: bytes, source: int, target: int) -> None:
        if not self._parted(source, target):
            inward = self._nats[target].inward(packet) if target in self._nats else packet
            if inward is None:
                return
            try:
                os.write(self._made[target][1], inward)
            except (BlockingIOError, OSError):
                return  # dropped, as by a full receive queue

    def _at(self, due: float, action: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, Event(due, self._number, action))


def main() -> None:
    die_with_parent(signal.SIGKILL)
    line = Line(Plan.model_validate_json(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"pid": os.getpid(), "namespaces": line.namespaces}), flush=True)
    line.run()


if __name__ == "__main__":
    main()
