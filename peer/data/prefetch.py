"""A stream that is read ahead by a thread, so that the accelerator never waits for data: a bounded queue, batches in
pinned memory where there is CUDA, errors where the training is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from peer.data.batches import BatchStream, Cursor
from peer.errors import RunError, UserError
from peer.process import slices

DEPTH = 8  # batches
BATCH_TIMEOUT = 600.0  # seconds without a batch
QUEUE_LOOK_SECONDS = 0.2  # seconds between two looks at whether the other side is still there
CLOSING = 5.0  # seconds for the thread to end


@dataclass(frozen=True)
class _Read:
    """A batch, and where the stream was after it."""

    batch: Tensor
    position: int
    cursor: Cursor | None


class Prefetched:
    """``stream`` read ahead. ``position`` and ``cursor`` are of what was handed out, not of what was read."""

    def __init__(self, stream: BatchStream, *, pin: bool, depth: int = DEPTH) -> None:
        self._stream, self._pin, self._depth = stream, pin, depth
        self.position, self._cursor = stream.position, stream.cursor
        self._reader: _Reader | None = None

    @property
    def cursor(self) -> Cursor | None:
        return self._cursor

    def resume(self, position: int, cursor: Cursor | None) -> None:
        """Go on after batch number ``position``; what was read ahead is dropped."""
        self.close()
        self._stream.resume(position, cursor)
        self.position, self._cursor = position, self._stream.cursor

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` batches. Raises what reading raised, one batch after the last good one."""
        for _ in range(count):
            if self._reader is None:
                self._reader = _Reader(self._stream, self._pin, self._depth)
            read = self._reader.next()
            self.position, self._cursor = read.position, read.cursor
            yield read.batch

    def close(self) -> None:
        """End the thread; the stream stands where it has read to, so :meth:`resume` is what goes on from here."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._stream.close()


class _Reader:
    """The thread and its queue."""

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
        raise RunError(f"run.data: no batch came in {BATCH_TIMEOUT:.0f} s; is the disk or network slow?")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for batch in self._stream.take(1):
                    ready = batch.pin_memory() if self._pin else batch
                    self._put(_Read(ready, self._stream.position, self._stream.cursor))
        except Exception as error:  # noqa: BLE001 - it is raised again where the training is
            self._put(error)

    def _put(self, what: _Read | Exception) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(what, timeout=QUEUE_LOOK_SECONDS)
                return
            except queue.Full:
                continue
