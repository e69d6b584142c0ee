"""The cost of scraping a peer's metrics: tokens/s of its inner loop with and without a scraper.

python -m tests.benchmarks.scrape [--quick] [--json FILE]

A peer's InnerLoop makes blocks of steps while its metrics are served. In every other block another process scrapes them
once a second. (Prometheus does so every five seconds.)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import torch

from peer import logs
from peer.data import corpus
from peer.data.batches import TokenStream
from peer.replica import model
from peer.telemetry.metrics import ActivityTimer, Metrics
from tests.benchmarks.common import finish, options
from tests.benchmarks.inner_loop.comparison import LENGTH, RUN, inner_loop

STEPS = 30  # per block


class Scraper:
    """The process that scrapes."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.scrape.scraper", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")

    def stop(self) -> int:
        """Stop scraping; the number of answers since the start."""
        assert self._process.stdout is not None
        self.tell("stop")
        return int(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


@contextmanager
def scraped(metrics: Metrics) -> Iterator[Scraper]:
    """Serve the metrics and start a scraper."""
    address, close = metrics.serve("127.0.0.1", 0)
    scraper = Scraper(f"http://{address}/metrics")
    try:
        yield scraper
    finally:
        scraper.end()
        close()


def ratio(pairs: int) -> tuple[float, float]:
    """Median over ``pairs`` of tokens/s while scraped divided by that of the other block; scrapes per second."""
    stream = TokenStream(
        corpus.load(RUN.data).train, batch_size=RUN.batch_size, sequence_length=LENGTH, seed=0, stream=1
    )
    inner = inner_loop(model.build(RUN))
    metrics = Metrics()
    metrics.set_build(method=RUN.outer.name, run=RUN.name, config="0" * 64)
    timer = ActivityTimer(metrics, lambda: None)
    ratios, answered, watched = [], 0, 0.0
    with scraped(metrics) as scraper, timer("inner"):
        for pair in range(-1, pairs):  # the first one warms up
            seconds = {}
            for busy in (True, False) if pair % 2 else (False, True):
                if busy:
                    scraper.tell("go")
                began = time.monotonic()
                inner.run(stream.take(STEPS))
                seconds[busy] = time.monotonic() - began
                if busy:
                    count = scraper.stop()
            if pair >= 0:
                answered, watched = answered + count, watched + seconds[True]
                ratios.append(seconds[False] / seconds[True])
    low, _, high = quantiles(ratios, n=4)
    print(
        f"{answered} scrapes in {watched:.0f} s of {pairs} blocks; ratios: lowest {min(ratios):.3f}, "
        f"quartiles {low:.3f}, {median(ratios):.4f}, {high:.3f}, highest {max(ratios):.3f}"
    )
    return median(ratios), answered / watched


def main() -> None:
    args = options("tokens/s of a peer's inner loop with and without scrapes of its metrics")
    logs.quiet_libraries()
    torch.set_num_threads(1)
    tokens, often = ratio(20 if args.quick else 60)
    words = f"scraped {often:.1f} times a second, a peer's inner loop makes {tokens:.2%} of its tokens/s"
    finish("scrape", {"tokens_per_s_ratio": tokens, "scrapes_per_second": round(often, 2)}, words, args)
