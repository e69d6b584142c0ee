"""Threads that compute the replicas."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from peer.process import Stop


@contextmanager
def workers(count: int, stop: Stop) -> Iterator[ThreadPoolExecutor]:
    """A pool of ``count`` threads. It waits for what runs at its end: an error or Ctrl+C requests ``stop``, at which a
    replica ends its step, and what has not begun does not begin.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        stop.request()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
