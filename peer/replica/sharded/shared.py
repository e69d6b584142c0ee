"""Host memory that all ranks of a machine map: the slow weights, once a machine, and a window for what passes by."""

from __future__ import annotations

import mmap
import os

import torch

from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("ranks")

WINDOW_ELEMENTS = 16 * 2**20  # elements of fp32: 64 MiB
_BYTES = 4


class SharedMemory:
    """``phi``: slow weights of all parameters. ``window``: whatever rank 0 and the others hand over. Flat fp32."""

    def __init__(self, descriptor: int, numel: int, window: int) -> None:
        buffer = mmap.mmap(descriptor, _BYTES * (numel + window))
        whole = torch.frombuffer(buffer, dtype=torch.float32)
        self._whole, self.phi, self.window = whole, whole[:numel], whole[numel:]

    def pin(self) -> None:
        """Let this process's GPU copy from it and to it directly."""
        code = int(torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), self._whole.nbytes, 0))
        if code:
            log.warning("the slow weights cannot be pinned, copies to the GPU take longer: CUDA error %d", code)


def reserve(descriptor: int, numel: int, window: int) -> None:
    """Give the memory its size, before anybody maps it."""
    size = _BYTES * (numel + window)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise UserError(
            f"{size / 2**30:.2f} GiB for the slow weights cannot be had: {error.strerror}; "
            "end other programs, or take a smaller model"
        ) from None
