"""One member of the all-reduce benchmark, which starts it.

python -m tests.benchmarks.all_reduce.member KIND ADDRESS PLACE MEMBERS NUMEL ROUNDS

KIND: ours or hivemind. ADDRESS: the first member's address, or ``-`` for the first member. The vectors of all members
have the same norm and a known mean. It prints ``address``, then for each round the seconds from the boundary to the
result, the library's report, and the share of wrong elements.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from peer import logs

STALL = 5.0  # seconds without a byte
MATCHMAKING = 3.0  # seconds; hivemind's documentation: 3 to 5 for small local runs
PHASE = 4.0  # seconds of the inner steps, in which both form their group
KILLED = 2  # place of the member that is killed


def ours(address: str, place: int, members: int, numel: int, rounds: int) -> None:
    """The peer's own matchmaking and group exchange."""
    from peer.config.schema import ExchangeConfig, SwarmRunConfig
    from peer.exchange.group.all_reduce import AllReduceExchange
    from peer.exchange.group.streams import REDUCE_PROTOCOL, IncomingStreams
    from peer.process import LoopContext, Stop
    from peer.rounds.contribution import Vector
    from peer.rounds.progress import Progress
    from peer.rounds.state import Lineage, State
    from peer.rounds.types import Grouping
    from peer.swarm.directory.records import NO_REPORT
    from peer.swarm.presence import Presence
    from tests.benchmarks.swap_partner import peer_node

    vector = vector_of(place, members, numel)
    progress, counters = Progress(), SimpleNamespace(round=0, lineage=Lineage())
    initial = () if address == "-" else (address,)
    with tempfile.TemporaryDirectory() as folder, peer_node(Path(folder) / "key", initial) as node:
        incoming = IncomingStreams()
        node.call(node.serve_members(REDUCE_PROTOCOL, incoming.accept), 10)
        presence = Presence(
            node,
            SwarmRunConfig(inner_steps=100),
            grouping=Grouping.EVERYONE,
            equal_replicas=False,
            training=LoopContext(progress, Stop()),
            counters=counters,
            step=lambda: 0,
            report=lambda: NO_REPORT,
            metrics_address=None,
        )
        presence.enter(lambda: State(0, 0, [vector]), 0)
        print(f"address {node.addresses[0]}", flush=True)
        settings = ExchangeConfig(codec="none", stall=STALL, max_norm_ratio=1e9)
        exchange = AllReduceExchange(network=node, incoming=incoming, numel=numel, settings=settings)
        progress.begin(1, 1)
        time.sleep(PHASE)  # the step by which others are told when the next boundary comes
        progress.tick()
        while presence.size < members:
            presence._members.refresh_all()
            time.sleep(0.1)
        for number in range(rounds):
            progress.begin(1, 1)
            time.sleep(PHASE)
            progress.tick()
            began = time.monotonic()
            print("begin", flush=True)
            counters.round = number
            group = presence.group_for(number)
            averaged = exchange.average(Vector(vector), group)
            tell(began, averaged.outcome.value, averaged.mean, members)
        time.sleep(2)


def hivemind(address: str, place: int, members: int, numel: int, rounds: int) -> None:
    """hivemind's DecentralizedAverager, scheduled before the boundary as its own optimizer does it."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.dht import DHT
    from hivemind.utils import get_dht_time

    initial = [] if address == "-" else [address]
    dht = DHT(initial_peers=initial, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    print(f"address {dht.get_visible_maddrs()[0]}", flush=True)
    vector = vector_of(place, members, numel)
    tensors = [piece.clone() for piece in vector.chunk(64)]
    averager = DecentralizedAverager(
        tensors,
        dht,
        start=True,
        prefix="bench",
        target_group_size=members,
        min_matchmaking_time=MATCHMAKING,
        request_timeout=MATCHMAKING / 2,
        next_chunk_timeout=STALL,
        sender_timeout=STALL,
        reducer_timeout=2 * STALL,
        allreduce_timeout=60,
    )
    time.sleep(2)
    for _ in range(rounds):
        with averager.get_tensors() as now:
            for tensor, piece in zip(now, vector.chunk(64), strict=True):
                tensor.copy_(piece)
        time.sleep(PHASE - MATCHMAKING)
        control = averager.step(scheduled_time=get_dht_time() + MATCHMAKING, wait=False, require_trigger=True)
        time.sleep(MATCHMAKING)
        began = time.monotonic()
        print("begin", flush=True)
        control.allow_allreduce()
        try:
            found = control.result(60)
        except Exception as error:  # noqa: BLE001 - the library names none
            print(f"failed: {error!r}", flush=True)
            found = None
        with averager.get_tensors() as now:
            mean = torch.cat([tensor.flatten() for tensor in now])
        tell(began, "merged" if found else "failed", mean, members)
    time.sleep(2)
    averager.shutdown()
    dht.shutdown()


def vector_of(place: int, members: int, numel: int) -> torch.Tensor:
    """1 to ``members``, again and again; each member begins with another one."""
    return 1.0 + (torch.arange(numel) + place).remainder(members).float()


def tell(began: float, said: str, mean: torch.Tensor, members: int) -> None:
    """Print a round. Right is the mean of all members, or of all but the killed one, in every element."""
    seconds, total = time.monotonic() - began, members * (members + 1) / 2
    without = (total - vector_of(KILLED, members, mean.numel())) / (members - 1)
    wrong = min(float((mean - right).abs().gt(1e-3).float().mean()) for right in (total / members, without))
    print(f"round seconds={seconds:.4f} said={said} wrong={wrong:.6f}", flush=True)


if __name__ == "__main__":
    logs.quiet_libraries()
    torch.set_num_threads(1)
    kind, where, *numbers = sys.argv[1:]
    {"ours": ours, "hivemind": hivemind}[kind](where, *map(int, numbers))
