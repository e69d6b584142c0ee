"""``noloco-peer`` with sleeps as inner steps, so that 16 peers do not compete for two cores.

python -m tests.benchmarks.network_model.sleeping_peer train ...  environment: STEP_SECONDS, STEP_SIGMA (log-normal)

Node, rendezvous, swap and outer step are real. It writes the number of its DHT calls to the file ``$DHT_CALLS``.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from hivemind.dht.protocol import DHTProtocol
from torch import Tensor

import peer.training.replica
from peer.commands.cli import main
from peer.replica.inner_loop import InnerLoop

CALLS = ("call_ping", "call_store", "call_find")


class Sleeping(InnerLoop):
    """Sleeps and leaves the weights unchanged."""

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        sigma = float(os.environ["STEP_SIGMA"])
        time.sleep(float(os.environ["STEP_SECONDS"]) * random.lognormvariate(0.0, sigma))
        return torch.zeros(()), torch.zeros(())


def count_calls(file: Path) -> None:
    """Write the number of calls periodically, because the process may end in any way."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        original: Callable[..., Awaitable[Any]] = getattr(DHTProtocol, name)

        async def call(self: DHTProtocol, *arguments: Any, **more: Any) -> Any:
            calls[name] += 1
            return await original(self, *arguments, **more)

        setattr(DHTProtocol, name, call)

    def write() -> None:
        while True:
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps(calls), encoding="utf-8")
            temporary.replace(file)
            time.sleep(0.5)

    for name in CALLS:
        counted(name)
    threading.Thread(target=write, daemon=True).start()


if __name__ == "__main__":
    count_calls(Path(os.environ["DHT_CALLS"]))
    peer.training.replica.InnerLoop = Sleeping  # type: ignore[misc]
    main()
