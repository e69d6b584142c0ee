"""What peers send for the swarm itself: presences on real nodes in one process, in a network of their own.

python -m tests.benchmarks.network_model.presence MEMBERS

Their inner phases are sleeps of 15 s and their swaps are empty, so that nothing else is on the wire. It prints one line
of JSON: MB a minute and peer on the wire, with the headers of libp2p, TCP and IP, and kB by kind without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peer.p2p.dht.requests import CheckedP2P
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream
from peer.swarm.directory.records import Report
from tests.swarm.support import node_peer

PHASE = 15.0  # seconds
SETTLE, MEASURED = 40.0, 45.0  # seconds
TOKENS = 1851.75  # of a step
NAMES = ("peer-11", "peer-12", "peer-13")
REPORT = Report(
    version="0.2.0",
    tokens=123456789,
    train_loss=3.1415926535,
    val_loss=3.2515926535,
    seconds=3600.123456789,
    idle_seconds=12.123456789,
    members=16,
    partners=NAMES[:1],
    merges=240,
    merged_ago=7.123456789,
    refused=((NAMES[1], 2), (NAMES[2], 1)),
)


def in_a_network(members: int) -> dict[str, Any]:
    """The figures of one run, in a network namespace that ends with it."""
    script = f"ip link set lo up && exec {sys.executable} -m {__name__} {members}"
    command = ["unshare", "--net", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(members: int) -> dict[str, Any]:
    """In this network."""
    node_peer.STEP_SECONDS = PHASE / node_peer.STEPS
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="presence-") as folder, counted() as sent:
        bootstrap = Node(NodeSettings(None, "127.0.0.1", 0))
        stack.callback(bootstrap.kill)
        bootstrap.start()
        peers = []
        for number in range(members):
            peer = node_peer.Peer(f"peer-{number}", Path(folder), bootstrap.addresses, tokens_per_step=TOKENS)
            stack.callback(peer.node.kill)
            peer.presence._report = lambda: REPORT  # as long as that of a peer that trains
            peers.append(peer)
        for peer in peers:
            threading.Thread(target=peer.train, args=(1000,), daemon=True).start()
        time.sleep(SETTLE)
        seen = {peer.presence.size for peer in peers}
        sent.clear()
        began, before = time.monotonic(), _on_the_wire()
        time.sleep(MEASURED)
        shares = (time.monotonic() - began) / 60 * members
        wire, kinds = _on_the_wire() - before, dict(sent)
        seen |= {peer.presence.size for peer in peers}
        for peer in peers:
            peer.stop.request()
    kilobytes = {kind: round(size / shares / 1e3, 1) for kind, size in sorted(kinds.items())}
    return {"mb_per_minute": wire / shares / 1e6, "kb_by_kind": kilobytes, "members_seen": sorted(seen)}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that this process sends, by kind."""
    sent: Counter[str] = Counter()
    call, write = CheckedP2P.call_protobuf_handler, Stream.write

    async def counting_call(self: Any, peer_id: Any, name: str, input: Any, output: Any) -> Any:
        answer = await call(self, peer_id, name, input, output)
        sent[f"{name} request"] += input.ByteSize()
        sent[f"{name} answer"] += answer.ByteSize()
        return answer

    async def counting_write(self: Stream, data: bytes, timeout: float) -> None:
        sent["streams"] += len(data)
        await write(self, data, timeout)

    CheckedP2P.call_protobuf_handler, Stream.write = counting_call, counting_write  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        CheckedP2P.call_protobuf_handler, Stream.write = call, write  # type: ignore[method-assign]


def _on_the_wire() -> int:
    """Bytes sent on loopback so far."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))), flush=True)
    os._exit(0)  # threads of the peers sleep
