"""A rank that says after every order which tensors of its own it holds, and can be told to run out of memory.

python -m tests.unit.rank_account FILE [fail]    as a rank that torchrun has started
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from peer.ranks import launch, worker
from peer.ranks.orders import Step


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


def main() -> None:
    file = Path(sys.argv[1])
    obey = worker.Member.obey

    def and_account(self: worker.Member, order: Any) -> bool:
        if "fail" in sys.argv and isinstance(order, Step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of 3 GiB.")
        answered = obey(self, order)
        with torch.no_grad():
            held = {"order": type(order).__name__, "bytes": private_bytes(self._shards.phi)}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(held) + "\n")
        return answered

    worker.Member.obey = and_account  # type: ignore[method-assign]
    rank = launch.of(os.environ)
    assert rank is not None
    sys.exit(worker.run(rank))


if __name__ == "__main__":
    main()
