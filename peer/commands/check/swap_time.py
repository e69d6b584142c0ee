"""How long a swap of a run takes on a line, and what to set where that does not fit. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from peer.commands.check.finding import Finding, fail, ok, warn
from peer.config.methods import DecoupledConfig, LocalConfig, NoLoCoConfig
from peer.config.schema import CodecName, Config, RunConfig
from peer.exchange.codec import COEFFICIENT_BYTES, size
from peer.exchange.group.rounding import Rounding
from peer.p2p.deadline import MBIT
from peer.rounds.transfer_rule import swap_limit

TRIPS = 4  # in a swap: to meet, headers, verdicts
MOST_WAITED = 0.25  # of an inner phase, for a boundary that waits for its swap
TOPIC = "swap"


class Line(NamedTuple):
    """``up``, ``down``: bytes a second; ``trip``: seconds there and back."""

    up: float
    down: float
    trip: float

    def __str__(self) -> str:
        return f"up {mbit(self.up)}, down {mbit(self.down)} Mbit/s, round trip {1000 * self.trip:.0f} ms"

    def seconds(self, size: float) -> float:
        """Of an exchange of ``size`` bytes in each direction, both at the same time."""
        return size / max(1.0, min(self.up, self.down)) + TRIPS * self.trip


def mbit(rate: float) -> str:
    """``rate`` in bytes a second."""
    return f"{rate / MBIT:.3g}" if rate < 999 * MBIT else f"{rate / MBIT:.0f}"


def seconds_of_a_step(run: RunConfig, rates: Sequence[float]) -> float | None:
    """Of an inner step at the median of the members' ``rates``, tokens a second; ``None`` where none is known."""
    known = [rate for rate in rates if rate > 0]
    return run.batch_size * run.data.sequence_length / median(known) if known else None


def swap(config: Config, numel: int, line: Line, whole: Line, step: float | None, members: int) -> Iterator[Finding]:
    """What the lines mean for a run of ``numel`` parameters. ``line``: to one member; ``whole``: to several at once;
    ``step``: seconds of an inner step; ``members``: with this one.
    """
    run = config.run
    if isinstance(run.outer, LocalConfig):
        return
    in_pairs = isinstance(run.outer, NoLoCoConfig)
    used, sent = (line if in_pairs else whole), bytes_of(run, numel, members)
    seconds = used.seconds(sent)
    what = f"{_megabytes(sent)} each way" + (f" in {run.exchange.codec}" if in_pairs else f" in a group of {members}")
    if step is None:
        said = f"{what} take about {seconds:.3g} s; the seconds of an inner step are unknown: no member tells its own"
        yield ok(TOPIC, f"{said}. {run.inner_steps} of them should take longer than that")
        return
    phase_seconds = run.inner_time or run.inner_steps * step
    share, least = seconds / phase_seconds, 1.0 if run.exchange.overlap else MOST_WAITED
    of = f"of an inner phase ({phase_seconds:.3g} s, by the steps of the members)"
    said = f"{what} take about {seconds:.3g} s, {100 * share:.3g}% {of}"
    if share <= least:
        yield ok(TOPIC, said)
    elif in_pairs and seconds > swap_limit(run.exchange.stall, run.exchange.max_phases, phase_seconds):
        yield fail(TOPIC, f"{said}: no swap ends in time", _advice(config, numel, used, seconds, phase_seconds, least))
    else:
        why = "boundaries are postponed" if run.exchange.overlap else "each boundary waits for it"
        yield warn(TOPIC, f"{said}: {why}", _advice(config, numel, used, seconds, phase_seconds, least))


def bytes_of(run: RunConfig, numel: int, members: int) -> float:
    """That a peer sends, and receives, at a boundary."""
    if isinstance(run.outer, NoLoCoConfig):
        return size(run.exchange.codec, numel)
    if isinstance(run.outer, DecoupledConfig):
        return (members - 1) * run.outer.density * numel * COEFFICIENT_BYTES
    return 2 * (members - 1) / members * Rounding(run.exchange.codec).size(numel)


def _advice(config: Config, numel: int, line: Line, seconds: float, phase_seconds: float, least: float) -> str:
    """The settings by which ``seconds``, those of a swap on ``line``, become ``least`` of a phase."""
    run = config.run
    codecs: tuple[CodecName, ...] = ("int8", "int4") if isinstance(run.outer, NoLoCoConfig) else ()
    taken = {it: line.seconds(size(it, numel)) for it in codecs}
    shorter = {it: took for it, took in taken.items() if took < 0.9 * seconds}
    fitting = [it for it, took in shorter.items() if took <= least * phase_seconds]
    ways = [f"run.exchange.codec={it} ({100 * shorter[it] / phase_seconds:.3g}%)" for it in fitting[:1]]
    ways.append(_longer(run, seconds, phase_seconds, least))
    if shorter and not fitting:
        codec, took = min(shorter.items(), key=lambda it: it[1])
        ways.append(f"run.exchange.codec={codec} with {_longer(run, took, phase_seconds, least)}")
    limits = [
        f", or peer.network.{key} ({value}) higher here"
        for key in ("max_upload", "max_download")
        if (value := getattr(config.peer.network, key)) is not None
    ]
    return ", or ".join(f"{way} in the whole swarm" for way in ways) + "".join(limits)


def _longer(run: RunConfig, seconds: float, phase_seconds: float, least: float) -> str:
    """The setting by which ``seconds`` become ``least`` of a phase."""
    if run.inner_time:
        return f"run.inner_time={math.ceil(seconds / least)}"
    return f"run.inner_steps={math.ceil(run.inner_steps * seconds / phase_seconds / least)}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count < 1e9 else f"{count / 1e9:.3g} GB"
