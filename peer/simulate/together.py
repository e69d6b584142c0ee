"""The data of data-parallel training: one batch of each stream, behind one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.data import TokenStream


class Together(TokenStream):
    """A stream whose batch is the batches of ``streams`` at the same position: ``[N · B, T + 1]`` token ids."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self.position = 0

    def batch(self, position: int) -> Tensor:
        return torch.cat([stream.batch(position) for stream in self._streams])
