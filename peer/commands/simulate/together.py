"""The data of data-parallel training: one batch of each stream, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from peer.data.batches import BatchStream, Cursor


class Together:
    """A stream whose batch is the next batch of each of ``streams``: ``[N · B, T + 1]`` token ids."""

    cursor = None

    def __init__(self, streams: Sequence[BatchStream]) -> None:
        self._streams = streams
        self.position = 0

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """A simulation is not resumed."""
        raise NotImplementedError

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` batches."""
        for _ in range(count):
            self.position += 1
            yield torch.cat([batch for stream in self._streams for batch in stream.take(1)])

    def close(self) -> None:
        """Let go of their files."""
        for stream in self._streams:
            stream.close()
