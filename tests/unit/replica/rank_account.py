"""A rank that says after every command which tensors of its own it holds and how many threads it has. It can be told
to run out of memory, and how many cores its machine has.

python -m tests.unit.replica.rank_account FILE [fail] [cores=N]    as a rank that torchrun has started
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from peer.replica.sharded import launch, worker
from peer.replica.sharded.commands import OnShards, Step

SETTLE = 5.0  # seconds; what is held on purpose is still there then


def private_bytes(shared: torch.Tensor) -> int:
    """Of all tensors' storages, each once, without the memory that the ranks share."""
    ours = shared.untyped_storage().data_ptr()
    sizes = {}
    for it in gc.get_objects():
        if isinstance(it, torch.Tensor) and not it.is_meta:
            local: Any = it.to_local() if hasattr(it, "to_local") else it
            storage = local.untyped_storage()
            if storage.data_ptr() != ours:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def settled_bytes(member: worker.WorkerReplica) -> int:
    """What stays: gloo's threads keep a collective's tensors for a moment after its end, until they get the GIL."""
    optimizer = member._loop.optimizer
    parts = [*member._loop.model.parameters(), *(it for state in optimizer.state.values() for it in state.values())]
    own = sum((it.to_local() if hasattr(it, "to_local") else it).nbytes for it in parts)
    deadline = time.monotonic() + SETTLE
    while (held := private_bytes(member._shards.phi)) > 1.02 * own and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def main() -> None:
    file = Path(sys.argv[1])
    carry_out = worker.WorkerReplica.carry_out

    def and_account(self: worker.WorkerReplica, command: Any) -> bool:
        if "fail" in sys.argv and isinstance(command, Step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of 3 GiB.")
        answered = carry_out(self, command)
        with torch.no_grad():
            name = command.method.__name__ if isinstance(command, OnShards) else type(command).__name__
            held = {"command": name, "bytes": settled_bytes(self), "threads": torch.get_num_threads()}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(held) + "\n")
        return answered

    worker.WorkerReplica.carry_out = and_account  # type: ignore[method-assign]
    cores = next((int(it.removeprefix("cores=")) for it in sys.argv if it.startswith("cores=")), 0)
    if cores:
        os.sched_getaffinity = lambda _: set(range(cores))
    rank = launch.of(os.environ)
    assert rank is not None
    sys.exit(worker.run(rank))


if __name__ == "__main__":
    main()
