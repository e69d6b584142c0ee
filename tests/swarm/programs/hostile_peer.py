"""A member of the run that sends other weights than its own: ``noloco-peer`` with another codec.

python -m tests.swarm.programs.hostile_peer train ...        HOSTILE={nan,scale} in the environment

The rest of it is honest, so it is met like everybody else. ``nan``: one part in a thousand is not finite. ``scale``: a
hundred times as large.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import peer.exchange.codec as codec
from peer.cli import main

honest = codec.cast


def poisoned(name: codec.CodecName, part: Tensor) -> bytes:
    part = part.clone()
    if os.environ["HOSTILE"] == "nan":
        part[:: max(1, len(part) // 3)] = torch.nan
    else:
        part *= 100
    return honest(name, part)


if __name__ == "__main__":
    codec.cast = poisoned
    main()
