"""A peer's life without the network, in a process of its own: what memory did it take?

python -m tests.unit.replica.memory_peer CONFIG.yaml ... [A.B=C ...] [--no-checkpoint]

Prints JSON: the peak of the process's resident bytes, and of an accelerator the bytes that torch holds and those that
are free at the end.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from peer.config import load
from peer.data import corpus
from peer.data.open import validation
from peer.device.accelerator import pick_device
from peer.process import LoopContext
from peer.rounds.contribution import copy_own
from peer.training import replica
from peer.training.checkpoint import Checkpoints
from peer.training.state import PeerState
from tests.saved import save_checkpoint

with contextlib.suppress(ModuleNotFoundError):  # on a machine without hivemind
    import peer.training.assemble  # noqa: F401  all that a peer loads


def resident_peak() -> int:
    """Bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise KeyError("VmHWM")


def torch_peak(state: PeerState) -> int:
    """Of one step: see :func:`most_allocated`."""
    return most_allocated(lambda: state.inner.run(state.stream.take(1)))


def most_allocated(work: Callable[[], object]) -> int:
    """What the profiler saw allocated at most during ``work``, in addition to the bytes before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((it for it in results.events() if it.name() == "[memory]"), key=lambda it: it.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def main() -> None:
    files = [Path(it) for it in sys.argv[1:] if it.endswith(".yaml")]
    config = load.load(files, [it for it in sys.argv[1:] if "=" in it], environment={})
    device = pick_device(config.peer.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # each thread takes memory of its own
    text = corpus.load(config.run.data)
    state = replica.replica(config, text.train, stream=1, device=device, context=LoopContext())
    buffer = torch.empty(state.outer.slow.numel)
    state.inner.evaluate(validation(config.run, text.validation))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            state.inner.run(state.stream.take(1))
            contribution = state.outer.contribution()
            copy_own(contribution, buffer)  # type: ignore[arg-type]
            state.outer.apply(buffer)
        if "--no-checkpoint" not in sys.argv:
            save_checkpoint(Checkpoints(Path(folder), 1), 1, state.scalars(), state.tensors())
    found = {"resident": resident_peak()}
    if device.type == "cuda":
        found |= {"held": torch.cuda.max_memory_reserved(device), "free": torch.cuda.mem_get_info(device)[0]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
