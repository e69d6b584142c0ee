"""Other libraries on the same model, text and inner steps: hivemind's own Optimizer, and torchft's DiLoCo over gloo.

python -m tests.benchmarks.wan.reference {hivemind,torchft} JSON     started by others.py, one process per host

Both run this project's inner loop with another optimizer, so they differ only in how they wait for each other. Waiting
is the time by which a step of the optimizer exceeds the median.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from peer.config import load
from peer.data import corpus, open
from peer.process import LoopContext
from peer.replica.inner_loop import InnerLoop
from peer.training import replica as build
from peer.training.state import PeerState

WAIT = 60.0


@dataclass(frozen=True)
class Seat:
    """One process. ``server``: the address on host 0 of hivemind's first peer or of torchft's lighthouse."""

    config: str
    overrides: tuple[str, ...]
    host: str
    index: int
    world: int
    server: str
    folder: str


class Timed:
    """Measures each step of the inner loop's optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._step, self.seconds = optimizer.step, list[float]()
        optimizer.step = self.step

    def step(self, *arguments: Any, **more: Any) -> Any:
        began = time.monotonic()
        result = self._step(*arguments, **more)
        self.seconds.append(time.monotonic() - began)
        return result

    def waited(self) -> float:
        usual = median(self.seconds)
        return sum(max(0.0, seconds - usual) for seconds in self.seconds)


class Wrapped:
    """hivemind's Optimizer returns copies of its parameter groups: a learning rate that is set there has no effect."""

    def __init__(self, optimizer: Any, groups: list[dict[str, Any]]) -> None:
        self.step, self.zero_grad, self.param_groups = optimizer.step, optimizer.zero_grad, groups


def replica(seat: Seat) -> tuple[PeerState, list[Tensor], int]:
    """This process's training state, its validation batches and H."""
    torch.set_num_threads(1)
    config = load.load(Path(seat.config), list(seat.overrides))
    text = corpus.load(config.run.data)
    state = build.replica(config, text.train, stream=seat.index, device=torch.device("cpu"), context=LoopContext())
    return state, open.validation(config.run, text.validation), config.run.inner_steps


@contextmanager
def hivemind(inner: InnerLoop, seat: Seat, h: int, batch: int) -> Iterator[None]:
    """Local updates; all peers average their weights about every H steps, in the background, which is its default."""
    import hivemind as library

    key = {"identity_path": f"{seat.folder}/{seat.index}.key"}
    dht = library.DHT(initial_peers=[seat.server], host_maddrs=[f"/ip4/{seat.host}/tcp/0"], start=True, **key)
    optimizer = library.Optimizer(
        dht=dht,
        run_id="wan",
        optimizer=inner.optimizer,
        batch_size_per_step=batch,
        target_batch_size=batch * h * seat.world,
        use_local_updates=True,
        matchmaking_time=5.0,
        averaging_timeout=WAIT,
    )
    inner.optimizer = Wrapped(optimizer, inner.optimizer.param_groups)  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.shutdown()
        dht.shutdown()


@contextmanager
def torchft(inner: InnerLoop, seat: Seat, h: int, batch: int) -> Iterator[None]:
    """One fragment, blocking, with this project's outer hyper-parameters of DiLoCo."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = TCPStore(seat.host, 29500, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2 * WAIT)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=seat.world,
        use_async_quorum=False,
        timeout=timedelta(seconds=2 * WAIT),
        quorum_timeout=timedelta(seconds=2 * WAIT),
        rank=0,
        world_size=1,
        store_addr=seat.host,
        store_port=store.port,
        lighthouse_addr=seat.server,
        replica_id=f"peer-{seat.index}",
        hostname=seat.host,
        init_sync=False,
    )
    outer = torch.optim.SGD(inner.model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    with DiLoCo(manager, [inner.model], inner.optimizer, outer, sync_every=h, pin_memory=False):
        yield
    manager.shutdown(wait=False)


LIBRARIES = {"hivemind": hivemind, "torchft": torchft}


def train(library: str, seat: Seat) -> None:
    """Make all steps and print the results as one line of JSON."""
    state, validation, h = replica(seat)
    config = load.load(Path(seat.config), list(seat.overrides))
    with LIBRARIES[library](state.inner, seat, h, config.run.batch_size):
        timed = Timed(state.inner.optimizer)
        (Path(seat.folder) / f"{seat.index}.ready").touch()
        until = time.monotonic() + WAIT
        while len(list(Path(seat.folder).glob("*.ready"))) < seat.world and time.monotonic() < until:
            time.sleep(0.1)
        began, losses = time.monotonic(), []
        while state.inner.step < config.run.steps:
            report = state.inner.run(state.stream.take(min(h, config.run.steps - state.inner.step)))
            losses.append((time.monotonic() - began, report.loss))
        seconds = time.monotonic() - began
        found = {"seconds": seconds, "waited": timed.waited(), "steps": state.inner.step, "losses": losses}
    found["val_loss"] = state.inner.evaluate(validation)
    (Path(seat.folder) / f"{seat.index}.json").write_text(json.dumps(found), encoding="utf-8")


def serve(library: str, seat: Seat) -> None:
    """Run the server that the library needs, a DHT or a lighthouse, until stdin ends."""
    if library == "hivemind":
        import hivemind as hivemind_

        dht = hivemind_.DHT(host_maddrs=[f"/ip4/{seat.host}/tcp/0"], start=True)
        address = next(str(it) for it in dht.get_visible_maddrs() if seat.host in str(it))
    else:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind=f"{seat.host}:29510", min_replicas=seat.world, join_timeout_ms=2000)
        address = f"http://{seat.host}:29510"
        assert lighthouse.address()
    print(address, flush=True)
    sys.stdin.read()
    os._exit(0)  # neither library ends all its threads


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    seat = replace(Seat(**given), overrides=tuple(given["overrides"]))
    (serve if sys.argv[2] == "serve" else train)(sys.argv[1], seat)
    os._exit(0)
