"""A stream that a thread reads ahead, so that the accelerator does not wait for data: a bounded queue, with batches in
pinned memory for a device that copies from it. Errors are raised in the thread that trains.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

from torch import Tensor

from peer.clock import slices
from peer.data.batches import BatchStream, Cursor
from peer.errors import RunError, UserError

DEPTH = 8  # batches
BATCH_TIMEOUT = 600.0  # seconds without a batch
QUEUE_LOOK_SECONDS = 0.2  # seconds between two checks that the other thread is alive
CLOSING = 5.0  # seconds for the thread to end

_Read = tuple[Tensor, int, Cursor | None]  # a batch, and the stream's position and cursor after it


class Prefetched:
    """``stream``, read ahead. ``position`` and ``cursor`` count the batches taken, not the batches read."""

    def __init__(self, stream: BatchStream, *, pin: bool, depth: int = DEPTH) -> None:
        self._stream, self._pin, self._depth = stream, pin, depth
        self.position = stream.position
        self.cursor: Cursor | None = stream.cursor
        self._reader: _Reader | None = None

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """See :class:`BatchStream`. The batches read ahead are dropped."""
        self.close()
        self._stream.resume(position, cursor)
        self.position, self.cursor = position, self._stream.cursor

    def take(self, count: int) -> Iterator[Tensor]:
        """See :class:`BatchStream`. Raises the reader's error after the last good batch."""
        for _ in range(count):
            if self._reader is None:
                self._reader = _Reader(self._stream, self._pin, self._depth)
            batch, self.position, self.cursor = self._reader.next()
            yield batch

    def close(self) -> None:
        """End the thread. The inner stream is ahead of ``position``: call :meth:`resume` to go on."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._stream.close()


class _Reader:
    """The reading thread and its queue."""

    def __init__(self, stream: BatchStream, pin: bool, depth: int) -> None:
        self._stream, self._pin = stream, pin
        self._queue: queue.Queue[_Read | Exception] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._thread.start()

    def next(self) -> _Read:
        for patience in slices(BATCH_TIMEOUT, QUEUE_LOOK_SECONDS):
            try:
                found = self._queue.get(timeout=patience)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    raise RunError("run.data: the thread that reads it has ended") from None
                continue
            if isinstance(found, UserError | RunError):
                raise found
            if isinstance(found, Exception):
                raise RunError(f"run.data: {type(found).__name__}: {found}") from found
            return found
        raise RunError(f"run.data: no batch was read in {BATCH_TIMEOUT:.0f} s; is the disk or network slow?")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for batch in self._stream.take(1):
                    ready = batch.pin_memory() if self._pin else batch
                    self._put((ready, self._stream.position, self._stream.cursor))
        except Exception as error:  # noqa: BLE001 - raised again in the thread that trains
            self._put(error)

    def _put(self, what: _Read | Exception) -> None:
        while not self._closing.is_set():
            with suppress(queue.Full):
                self._queue.put(what, timeout=QUEUE_LOOK_SECONDS)
                return
