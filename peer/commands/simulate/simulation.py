"""``noloco-peer simulate``: builds the replicas, runs the world, makes the figures.

A simulation measures loss, bytes and waiting by the simulated clock. Its wall-clock time says nothing about a swarm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.replica import Replica
from peer.commands.simulate.sampling import Sampler, SampleRow
from peer.commands.simulate.world import World
from peer.config.methods import LocalConfig
from peer.config.schema import Config
from peer.data.batches import BatchStream, Cursor
from peer.data.corpus import Corpus
from peer.data.open import batches, corpus_of, validation
from peer.errors import UserError
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.process import LoopContext, Stop
from peer.replica.inner_loop import token_loss
from peer.rounds.types import Outcome
from peer.training import replica
from peer.training.validation import sample_of


class Simulation:
    """``config``: as :func:`peer.commands.simulate.options.with_method` returns it."""

    def __init__(self, config: Config, options: Options) -> None:
        options.check(config)
        self.config, self.options = config, options
        self.replicas: list[Replica] = []  # of the last run, at its end
        self.stop = Stop()  # once it is requested, no replica begins a step
        self._text = corpus_of(config.run)

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The summary, with the samples under ``curves``. ``say`` gets one line a sample."""
        began = time.monotonic()
        torch.set_num_threads(1)  # matrices are small: a thread a replica is faster than two threads a matrix
        self.replicas = replicas = self._replicas()
        untrained = self._build("mean", self.config, 0)
        held_out = validation(self.config.run, self._text.validation)
        options = self.options
        if _draws_numbers(untrained.state.inner.model, held_out[0]):
            options = replace(options, workers=1)  # several would draw from torch's one generator in any order

        def sample(at: float) -> None:
            if self.options.method is Method.DDP:
                self._count_ddp(replicas[0])
            sampler.sample(at)
            row = sampler.rows[-1]
            say(
                f"step {at:.0f}: {row['tokens']:,} tokens, validation loss {row['val_loss_mean']:.4f} "
                f"(worst {row['val_loss_worst']:.4f}, averaged model {row['val_loss_averaged_model']:.4f}), "
                f"spread {row['spread']:.2g}"
            )

        torch.default_generator.manual_seed(self.config.run.seed)
        with workers(options.workers, self.stop) as pool:
            sampler = Sampler(replicas, untrained, held_out, pool)
            World(self.config, options, replicas, sample, pool).run()
        return self._summary(sampler, time.monotonic() - began)

    def _replicas(self) -> list[Replica]:
        count, speeds = self.options.replicas, self.options.speeds
        if self.options.method is Method.DDP:
            return [self._ddp()]
        return [
            self._build(f"replica-{index}", self.config, index, speeds[index % len(speeds)]) for index in range(count)
        ]

    def _part(self, index: int) -> Corpus:
        if not self.options.non_iid:
            return self._text
        whole = self._text.in_memory
        borders = np.linspace(0, len(whole), self.options.replicas + 1).astype(int)
        part, least = whole[borders[index] : borders[index + 1]], self.config.run.data.sequence_length + 2
        if len(part) < least:
            raise UserError(f"--non-iid: a replica has {len(part)} tokens and needs {least}; add text")
        return Corpus(part, self._text.validation)

    def _build(self, name: str, config: Config, index: int, speed: float = 1.0) -> Replica:
        steps = max(1, round(config.run.steps * speed))
        run = config.run.model_copy(update={"steps": steps})
        config = config.model_copy(update={"run": run})
        text, device = self._part(index), torch.device("cpu")
        state = replica.replica(config, text.train, stream=index, device=device, context=LoopContext())
        codec = codec_named(run.exchange.codec, state.outer.slow.numel)
        sample = sample_of(validation(run, self._text.validation))
        swap = self.options.overlap(run)
        return Replica(name, state, speed, steps, run.inner_steps, codec, Guard(), swap, sample, stop=self.stop)

    def _ddp(self) -> Replica:
        """One model on the batches of all replicas: the mean of the gradients is the gradient of the mean loss."""
        peer = self.config.peer.model_copy(update={"micro_batch": self.config.run.batch_size})
        run = self.config.run.model_copy(update={"outer": LocalConfig(name="local")})
        config = self.config.model_copy(update={"peer": peer, "run": run})
        one = self._build("replica-0", config, 0)
        streams = [batches(run, self._part(index).train, index) for index in range(self.options.replicas)]
        one.state.stream = Together(streams)
        return one

    def _count_ddp(self, one: Replica) -> None:
        """The bytes of an all-reduce of the gradients in every step, summed over all replicas."""
        count = self.options.replicas
        one.bytes_sent = round(one.state.inner.step * 2 * (count - 1) * 4 * one.state.outer.slow.numel)
        one.bytes_received = one.bytes_sent

    def _summary(self, sampler: Sampler, seconds: float) -> dict[str, Any]:
        last = sampler.rows[-1]
        rows = [_row(*it) for it in zip(self.replicas, sampler.losses[0], sampler.losses[-1], strict=True)]
        if self.options.method is Method.DDP:
            count = self.options.replicas
            shared = {key: rows[0][key] // count for key in ("tokens", "bytes_sent", "bytes_received")}
            rows = [{**rows[0], **shared} for _ in range(count)]
        simulated = sum(it.steps / it.speed for it in self.replicas)
        waited = sum(it.waited for it in self.replicas)
        return {
            "peers": {f"replica-{index}": row for index, row in enumerate(rows)},
            "swarm": {
                "method": self.options.method.value,
                "peers": len(rows),
                **{key: last[key] for key in ("tokens", "val_loss_mean", "val_loss_worst", "val_loss_averaged_model")},
                "spread": last["spread"],
                "idle_share": waited / (waited + simulated),
                "bytes_sent": last["bytes_sent"],
                "wall_seconds": seconds,
            },
            "curves": sampler.rows,
        }


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


def _draws_numbers(model: nn.Module, batch: Tensor) -> bool:
    """Does it draw random numbers while it trains, as dropout does? It may do so without a module for it."""
    before = torch.get_rng_state()
    with torch.no_grad():
        token_loss(deepcopy(model).train(), batch[:1], False)
    return not torch.equal(before, torch.get_rng_state())


class Together:
    """The data of data-parallel training: a batch joins one batch of each stream, ``[N · B, T + 1]`` token ids."""

    cursor = None

    def __init__(self, streams: Sequence[BatchStream]) -> None:
        self._streams = streams
        self.position = 0

    def resume(self, position: int, cursor: Cursor | None) -> None:
        raise NotImplementedError  # a simulation is not resumed

    def take(self, count: int) -> Iterator[Tensor]:
        for _ in range(count):
            self.position += 1
            yield torch.cat([batch for stream in self._streams for batch in stream.take(1)])

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _row(it: Replica, first_val_loss: float, val_loss: float) -> SampleRow:
    return {
        "steps": it.state.inner.step,
        "tokens": it.state.counters.tokens,
        "first_train_loss": it.first_loss,
        "last_train_loss": it.last_loss,
        "first_val_loss": first_val_loss,
        "val_loss": val_loss,
        "rounds": {outcome.value: it.outcomes[outcome] for outcome in Outcome},
        "idle_share": it.waited / (it.waited + it.steps / it.speed),
        "partners": dict(sorted(it.partners.items())),
        "bytes_sent": it.bytes_sent,
        "bytes_received": it.bytes_received,
    }
