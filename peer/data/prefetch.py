"""A stream that a thread reads ahead, so that the accelerator does not wait for data: a bounded queue, with batches in
pinned memory for a device that copies from it. Errors are raised in the thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

from torch import Tensor

from peer import clock
from peer.data.batches import BatchStream, Cursor
from peer.errors import RunError, UserError

DEPTH = 8  # batches
DATA_SILENCE = 600.0  # seconds without a batch and without a row
LOOK = 1.0  # seconds between two looks at the rows
CLOSING = 5.0  # seconds for the thread to end

_Read = tuple[Tensor, int, Cursor | None]  # a batch, and the stream's position and cursor after it


class Prefetched:
    """``stream``, read ahead. ``position`` and ``cursor`` count the batches taken, not the batches read.

    ``passed``: rows that were read, skipped ones too. While it grows a batch is waited for, until the peer is ``away``.
    """

    def __init__(
        self,
        stream: BatchStream,
        *,
        pin: bool,
        depth: int = DEPTH,
        passed: Callable[[], int] = lambda: 0,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stream, self._pin, self._depth = stream, pin, depth
        self._passed, self._away = passed, away
        self.position = stream.position
        self.cursor: Cursor | None = stream.cursor
        self._worker: Executor | None = None
        self._coming: deque[Future[_Read]] = deque()

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """See :class:`BatchStream`. The batches read ahead are dropped."""
        self.close()
        self._stream.resume(position, cursor)
        self.position, self.cursor = position, self._stream.cursor

    def take(self, count: int) -> Iterator[Tensor]:
        """See :class:`BatchStream`. Raises the reader's error after the last good batch, again in each later call.

        Fewer batches when this peer is away before they are read.
        """
        for _ in range(count):
            if not self.await_next():
                return
            batch, self.position, self.cursor = _result(self._coming[0])
            self._coming.popleft()
            yield batch

    def await_next(self) -> bool:
        """Wait until the next batch is read; ``False`` if this peer is away before. Raises :class:`RunError` when the
        source is silent; another error of the reader is for :meth:`take`.
        """
        if self.begin():
            return True
        next_batch, before, left = self._coming[0], self._passed(), DATA_SILENCE
        while True:
            clock.wait([next_batch], LOOK)
            if next_batch.done():
                return True
            now = self._passed()
            before, left = now, DATA_SILENCE if now > before else left - LOOK
            if self._away():
                return False
            if left <= 0:
                raise RunError(f"run.data: no row was read in {DATA_SILENCE:.0f} s; does the disk or network hang?")

    def begin(self) -> bool:
        """Begin to read, or go on; returns whether the next batch is read."""
        self._worker = self._worker or clock.worker("data")
        while len(self._coming) <= self._depth:
            self._coming.append(self._worker.submit(self._read))
        return self._coming[0].done()

    def close(self) -> None:
        """End the thread. The inner stream is ahead of ``position``: call :meth:`resume` to go on."""
        for future in self._coming:
            future.cancel()
        if self._worker is not None:
            self._worker.shutdown(wait=not clock.wait(self._coming, CLOSING).not_done)
            self._worker = None
        self._coming.clear()
        self._stream.close()

    def _read(self) -> _Read:
        (batch,) = self._stream.take(1)
        return batch.pin_memory() if self._pin else batch, self._stream.position, self._stream.cursor


def begin_reading(stream: BatchStream) -> bool:
    """:meth:`Prefetched.begin`; tokens in memory are there."""
    return not isinstance(stream, Prefetched) or stream.begin()


def await_next(stream: BatchStream) -> bool:
    """:meth:`Prefetched.await_next`; tokens in memory are there."""
    return not isinstance(stream, Prefetched) or stream.await_next()


def _result(future: Future[_Read]) -> _Read:
    try:
        return future.result()
    except (UserError, RunError):
        raise
    except Exception as error:
        raise RunError(f"run.data: {type(error).__name__}: {error}") from error
