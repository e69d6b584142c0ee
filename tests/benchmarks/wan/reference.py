"""Other libraries with our inner loop: hivemind's Optimizer, and torchft's DiLoCo over gloo, plain and at its best.

python -m tests.benchmarks.wan.reference {serve,train} JSON     started by processes.py, one process a host
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer.config import load
from peer.config.schema import RunConfig
from peer.data import corpus, open
from peer.process import LoopContext
from peer.replica.inner_loop import InnerLoop
from peer.training import replica as build
from tests.benchmarks.wan.pacer import Paced

WAIT = 120.0  # seconds for one all-reduce, and for all to start
ONE_BUCKET = 2048  # MB: several buckets of torchft 0.2.0 may leave the last tensors out
ADDRESS = "address"


@dataclass(frozen=True)
class Seat:
    """One process. ``options`` are the library's; ``host``: the address of this process's host."""

    library: str
    options: dict[str, Any]
    config: tuple[str, ...]
    overrides: tuple[str, ...]
    host: str
    index: int
    world: int
    folder: str

    @property
    def server(self) -> str:
        """The address of hivemind's first peer, or of torchft's lighthouse."""
        return (Path(self.folder) / ADDRESS).read_text(encoding="utf-8")


class Merges(logging.Handler):
    """Counts hivemind's averaging rounds, and those that succeeded with at least one other peer."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.merged = self.rounds = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.merged += "Averaged parameters with" in text
        self.rounds += "Averaged parameters with" in text or "Averaging failed" in text


class Wrapped:
    """hivemind's Optimizer returns copies of its parameter groups: a learning rate that is set there has no effect."""

    def __init__(self, optimizer: Any, groups: list[dict[str, Any]]) -> None:
        self.step, self.zero_grad, self.param_groups = optimizer.step, optimizer.zero_grad, groups


@contextmanager
def hivemind(inner: InnerLoop, seat: Seat, run: RunConfig) -> Iterator[dict[str, int]]:
    """As its documentation has it for local updates: all peers average their weights about every H steps in the
    background (``delay_state_averaging``), in 16 bits.
    """
    import hivemind as library
    from hivemind.compression import Float16Compression

    key = {"identity_path": f"{seat.folder}/{seat.index}.key"}
    dht = library.DHT(initial_peers=[seat.server], host_maddrs=[f"/ip4/{seat.host}/tcp/0"], start=True, **key)
    optimizer = library.Optimizer(
        dht=dht,
        run_id="wan",
        optimizer=inner.optimizer,
        batch_size_per_step=run.batch_size,
        target_batch_size=run.batch_size * run.inner_steps * seat.world,
        use_local_updates=True,
        delay_state_averaging=True,
        state_averaging_compression=Float16Compression(),
        load_state_compression=Float16Compression(),
        verbose=True,
        **seat.options,
    )
    merges, said = Merges(), logging.getLogger("hivemind.optim.state_averager")
    said.addHandler(merges)
    inner.optimizer = Wrapped(optimizer, inner.optimizer.param_groups)  # type: ignore[assignment]
    told = {"merged": 0, "rounds": 0}
    yield told
    told.update(merged=merges.merged, rounds=max(merges.rounds, optimizer.local_epoch))


def fragments(model: nn.Module, count: int) -> list[nn.Module]:
    """The model in ``count`` parts of as many layers. The first one has the embedding and the head, maybe tied."""
    if count == 1:
        return [model]
    base: Any = model.model
    layers = list(base.layers)
    bounds = [round(part * len(layers) / count) for part in range(count + 1)]
    parts = [layers[start:stop] for start, stop in pairwise(bounds)]
    parts[0] += [it for name, it in base.named_children() if name != "layers"] + [model.lm_head]
    return [nn.ModuleList(part) for part in parts]


@contextmanager
def torchft(inner: InnerLoop, seat: Seat, run: RunConfig) -> Iterator[dict[str, int]]:
    """One bucket for each fragment, with the outer hyper-parameters of our DiLoCo. Its quantisation needs a GPU."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    patience = timedelta(seconds=WAIT)
    store = TCPStore(seat.host, 29500, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=seat.world,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=seat.host,
        store_port=store.port,
        lighthouse_addr=seat.server,
        replica_id=f"peer-{seat.index}",
        hostname=seat.host,
        init_sync=False,
    )
    options = dict(seat.options)
    parts = fragments(inner.model, options.pop("fragments"))
    outer = [torch.optim.SGD(it.parameters(), lr=0.7, momentum=0.5, nesterov=True) for it in parts]
    more = {"use_bucketization": True, "bucket_cap_mb": ONE_BUCKET, "pin_memory": False, **options}
    told = {"merged": 0, "rounds": 0}
    with DiLoCo(manager, parts, inner.optimizer, outer, sync_every=run.inner_steps, **more):
        yield told
    told.update(merged=manager.current_step(), rounds=run.steps * len(parts) // run.inner_steps)


LIBRARIES = {"hivemind": hivemind, "torchft": torchft}


def train(seat: Seat) -> None:
    """Make all steps; write the pacer's figures with ``merged``, ``rounds`` and ``val_loss``."""
    torch.set_num_threads(1)
    config = load.load([Path(it) for it in seat.config], seat.overrides)
    run, text = config.run, corpus.load(config.run.data)
    build.InnerLoop = Paced  # type: ignore[misc]
    state = build.replica(config, text.train, stream=seat.index, device=torch.device("cpu"), context=LoopContext())
    inner = state.inner
    assert isinstance(inner, Paced)
    with LIBRARIES[seat.library](inner, seat, run) as told:
        (Path(seat.folder) / f"{seat.index}.ready").touch()
        until = time.monotonic() + WAIT
        while len(list(Path(seat.folder).glob("*.ready"))) < seat.world and time.monotonic() < until:
            time.sleep(0.1)
        inner.run(state.stream.take(run.steps))
        ended = time.monotonic()
    inner.pacer.over(**told, over=ended, val_loss=inner.evaluate(open.validation(run, text.validation)))


def serve(seat: Seat) -> None:
    """Run the server that the library needs, a DHT or a lighthouse, until it is killed."""
    if seat.library == "hivemind":
        import hivemind as library

        dht = library.DHT(host_maddrs=[f"/ip4/{seat.host}/tcp/0"], start=True)
        address = next(str(it) for it in dht.get_visible_maddrs() if seat.host in str(it))
    else:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind=f"{seat.host}:29510", min_replicas=seat.world, join_timeout_ms=2000)
        address = f"http://{seat.host}:29510"
        assert lighthouse.address()
    file = Path(seat.folder) / ADDRESS
    file.with_suffix(".tmp").write_text(address, encoding="utf-8")
    file.with_suffix(".tmp").replace(file)
    sys.stdin.read()


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    seat = replace(Seat(**given), config=tuple(given["config"]), overrides=tuple(given["overrides"]))
    (serve if sys.argv[1] == "serve" else train)(seat)
    os._exit(0)  # neither library ends all its threads
