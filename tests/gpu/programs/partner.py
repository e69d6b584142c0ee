"""The partner of an overlapped swap, in a process of its own: it sends near-by weights and trains nothing.

python -m tests.gpu.programs.partner PORT CODEC PHI CHANGE    PHI: a file of fp32; CHANGE: the size of its own changes
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import torch

from peer.config.methods import NoLoCoConfig
from peer.config.schema import ExchangeConfig
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.exchange.pair.mailbox import OpenPart
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.types import Group, Link

LOOK = 0.05  # seconds


def main() -> None:
    port, codec, file, size = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    phi = torch.from_numpy(np.fromfile(file, dtype=np.float32))
    network = LoopThread()

    async def connect() -> Stream:
        return Stream(*await asyncio.open_connection("127.0.0.1", port), remote="peer", initiator=True)

    stream = network.call(connect(), 20)
    coder = codec_named(codec, len(phi))  # type: ignore[arg-type]
    exchange = OverlappedPairExchange(
        network=network, numel=len(phi), codec=coder, settings=ExchangeConfig(), guard=Guard()
    )
    mailbox = exchange.start(lambda: Group(0, (Link("peer", "peer", stream),), step_seconds=1.0))
    gamma, chance = NoLoCoConfig().gamma, torch.Generator().manual_seed(1)
    while (result := mailbox.result()) is None:
        mailbox.take_corrections()
        for index in mailbox.parts_to_open(idle=True)[:8]:  # the rest of the time belongs to the transfer
            start, stop = mailbox.parts[index]
            change = size * torch.randn(stop - start, generator=chance)
            mailbox.put(index, OpenPart(gamma * phi[start:stop] + change, change))
        if not mailbox.parts_to_open(idle=True):
            mailbox.wait(LOOK)
    exchange.close()
    network.close()
    print(result.outcome, result.detail)


if __name__ == "__main__":
    main()
