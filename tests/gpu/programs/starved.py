"""A peer on a device with little memory left.

python -m tests.gpu.programs.starved BYTES train --config FILE ...

On an accelerator torch's allocator refuses more than BYTES. On the CPU, which has no such limit, a step raises what the
allocator of an accelerator would raise. Without hivemind the peer is its inner loop alone.
"""

from __future__ import annotations

import argparse
import sys

import torch

from peer.commands import cli
from peer.device.accelerator import pick_device
from peer.errors import RunError
from peer.process import Stop
from peer.replica.inner_loop import InnerLoop, out_of_memory
from tests.gpu.site import no_network

AS_CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 3.00 GiB"


def alone(args: argparse.Namespace) -> int:
    """`noloco-peer train` without the swarm."""
    from peer.data import corpus
    from peer.process import LoopContext
    from peer.training import replica

    config = cli._loaded(args)
    device, tokens = pick_device(config.peer.device), corpus.load(config.run.data).train
    try:
        state = replica.replica(config, tokens, stream=1, device=device, context=LoopContext(stop=Stop()))
        state.inner.run(state.stream.take(2))
    except torch.OutOfMemoryError as error:
        raise RunError(out_of_memory(error, config)) from None
    return 0


def refuse(*args: object) -> None:
    raise torch.OutOfMemoryError(AS_CUDA_SAYS)


def main() -> None:
    limit, arguments = int(sys.argv[1]), sys.argv[2:]
    if "peer.device=cuda" in arguments:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    else:
        InnerLoop._backward = refuse  # type: ignore[assignment, method-assign]
    if no_network():
        cli._train = alone
    cli.main(arguments)


if __name__ == "__main__":
    main()
