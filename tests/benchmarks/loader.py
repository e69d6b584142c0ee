"""Does training wait for data? Tokens/s of the inner loop with each source against batches in memory.

python -m tests.benchmarks.loader [--quick] [--json FILE]

The standard library's text is written as each kind of file. Every loader prefetches in a thread, as in a peer. Blocks
of steps alternate between the loader and ready batches, in one process with one torch thread; the loader has the other
core. "waited" is the share of time in which the inner loop waits for a batch, which an accelerator would lose. The
ratio of the tokens/s also contains the effect of shared cores, and noise. "alone" is the rate without training.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from peer.commands import tokenize
from peer.config.data import AnyData, C4Data, HuggingFaceData, JsonlData, ParquetData, StdlibData, TokenizerConfig
from peer.config.schema import Config, RunConfig
from peer.data import corpus, open
from peer.data.open import read_ahead
from peer.process import LoopContext
from peer.replica import model
from peer.replica.inner_loop import InnerLoop
from tests.benchmarks.common import finish, options
from tests.unit.data.harness import bpe

CONFIG = Config()
LENGTH, BATCH, SHUFFLE, VOCABULARY = 128, 8, 1024, 4096
DOCUMENT = 3000  # characters, about the mean of C4


def write(folder: Path) -> dict[str, AnyData]:
    """Write the same text as every kind of source."""
    root = Path(sysconfig.get_path("stdlib"))
    whole = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.glob("*.py")))
    texts = [whole[start : start + DOCUMENT] for start in range(0, len(whole), DOCUMENT)]
    same: dict[str, Any] = {
        "sequence_length": LENGTH,
        "tokenizer": bpe(folder / "bpe", VOCABULARY, name="bpe", words=texts[::10]),
    }
    streamed = {**same, "shuffle": SHUFFLE}
    for index in range(8):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts[index::8]).encode()
        (folder / f"{index}.jsonl").write_bytes(rows)
        (folder / f"c4-train.{index:05d}-of-00008.json.gz").write_bytes(gzip.compress(rows))
    tokenize.run(
        [f"{folder}/*.jsonl"], folder / "tokens", str(folder / "bpe"), end=None, column="text", say=lambda line: None
    )
    (folder / "set").mkdir()
    for index in range(8):
        shutil.copy(folder / f"{index}.jsonl", folder / "set" / f"train-{index:05d}-of-00008.jsonl")
    hub: dict[str, Any] = {"name": "huggingface", "path": str(folder / "set"), **streamed}
    return {
        "stdlib": StdlibData(**same),
        "jsonl": JsonlData(name="jsonl", train=(f"{folder}/*.jsonl",), **streamed),
        "c4": C4Data(name="c4", folder=folder, **streamed),
        "parquet": ParquetData(name="parquet", train=(f"{folder}/tokens/*.parquet",), **streamed),
        "huggingface": HuggingFaceData(**hub),
        "huggingface_streaming": HuggingFaceData(streaming=True, **hub),
    }


def inner_loop() -> InnerLoop:
    """The demo's model with the tokenizer's vocabulary."""
    return InnerLoop(
        model.build(RunConfig(data=StdlibData(tokenizer=TokenizerConfig(name="bpe", vocabulary=VOCABULARY)))),
        CONFIG,
        device=torch.device("cpu"),
        context=LoopContext(),
    )


def measure(settings: AnyData, inner: InnerLoop, pairs: int, steps: int) -> dict[str, float]:
    """``ratio``: median over ``pairs`` of tokens/s with this loader divided by tokens/s with ready batches."""
    run = RunConfig(data=settings, batch_size=BATCH)
    stream = open.batches(run, corpus.load(settings).train, 1)
    ahead = read_ahead(run, stream, torch.device("cpu"))
    began = time.monotonic()
    ready = list(ahead.take(steps))
    first = time.monotonic() - began
    alone = timed(lambda: sum(1 for _ in ahead.take(20 * steps)))
    ratios, waiting, trained = [], Waiting(), 0.0
    for pair in range(-1, pairs):  # the first one warms up
        seconds = {}
        for kind in ("loader", "ready") if pair % 2 else ("ready", "loader"):
            batches = waiting.of(ahead.take(steps)) if kind == "loader" else ready
            seconds[kind] = timed(partial(inner.run, batches))
        if pair < 0:
            waiting.seconds = 0.0
            continue
        ratios.append(seconds["ready"] / seconds["loader"])
        trained += seconds["loader"]
    ahead.close()
    tokens = 20 * steps * BATCH * LENGTH
    return {
        "waited_share": waiting.seconds / trained,
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "alone_tokens_per_s": tokens / alone,
        "first_batches_s": first,
    }


class Waiting:
    """Seconds that the consumer has waited for batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self.seconds += time.monotonic() - began
            if batch is None:
                return
            yield batch


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def main() -> None:
    args = options("tokens/s of the inner loop with each loader against ready batches")
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        inner = inner_loop()
        for name, settings in write(Path(folder)).items():
            found[name] = measure(settings, inner, 8 if args.quick else 24, 10)
            print(f"{name}: {found[name]}", flush=True)
    worst = max(found, key=lambda name: found[name]["waited_share"])
    ratio = median(it["ratio"] for it in found.values())
    words = (
        f"loader: the inner loop waits for a batch at most {found[worst]['waited_share']:.3%} of its time ({worst}), "
        f"and makes {ratio:.1%} of its tokens/s with ready batches (median of the sources)"
    )
    shares = {"waited_share": found[worst]["waited_share"], "tokens_per_s_ratio": ratio}
    goals = {"the inner loop waits for a batch less than 1% of its time": found[worst]["waited_share"] < 0.01}
    finish("loader", {**shares, "sources": found}, words, args, goals)


if __name__ == "__main__":
    main()
