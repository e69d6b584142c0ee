"""The figures of a run, idle time, bytes and loss, from the rounds that peers have written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import mean, median
from typing import Any

from peer.commands.local_swarm.tail import Row, Tail
from peer.rounds.types import Outcome


def figures(tails: Sequence[Tail], inner_steps: int) -> dict[str, Any]:
    """The figures of one run, whose last peer is the slow one. Shares of idle time:

    ``idle_share``  all peers, without the first round and the last H steps, in which every method waits for its last
                    swap; ``_fast`` and ``_straggler`` are its two parts
    ``_together``   the same until the first peer reaches its last H steps: from then on the straggler of a pairwise
                    method has fewer partners, and at last none to wait for
    ``_of_all``     all rounds
    """
    rows = [row for tail in tails for row in tail.rounds]
    merged = [row for row in rows if row["outcome"] == Outcome.MERGED]
    return {
        "idle_share": _idle(_middle(tails, inner_steps) or rows),
        "idle_share_fast": _idle(_middle(tails[:-1], inner_steps) or rows),
        "idle_share_straggler": _idle(_middle(tails[-1:], inner_steps) or tails[-1].rounds),
        "idle_share_together": _idle(_middle(tails, inner_steps, _first_end(tails, inner_steps)) or rows),
        "idle_share_of_all": _idle(rows),
        "step_seconds_fast": _step_seconds(tails[:-1]),
        "step_seconds_straggler": _step_seconds(tails[-1:]),
        "val_loss": mean(tail.evals[-1]["val_loss"] for tail in tails),
        "bytes_per_round": median(row["bytes_sent"] for row in merged) if merged else 0,
        "rounds_merged": len(merged) / len(rows),
        "staleness_steps": mean(row["staleness"] for row in merged) if merged else 0.0,
        "seconds": max(tail.seconds for tail in tails),
        "losses": mean_curve([_curve(tail) for tail in tails]),
    }


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Seconds and training loss by round, both means over the peers, up to the last round that all have made."""
    return [(round(mean(it[0] for it in row), 2), mean(it[1] for it in row)) for row in zip(*curves, strict=False)]


def _curve(tail: Tail) -> list[tuple[float, float]]:
    return [(end, row["train_loss"]) for row, end in _ends(tail) if row["train_loss"] is not None]


def _middle(tails: Sequence[Tail], inner_steps: int, until: float = math.inf) -> list[Row]:
    """Rounds that ended before ``until`` (seconds of the run), without the first and those of the last H steps."""
    return [
        row
        for tail in tails
        for row, end in list(_ends(tail))[1:]
        if row["step"] <= tail.rounds[-1]["step"] - inner_steps and end <= until
    ]


def _first_end(tails: Sequence[Tail], inner_steps: int) -> float:
    """When the first peer ended a round of its last H steps."""
    return min(end for tail in tails for row, end in _ends(tail) if row["step"] > tail.rounds[-1]["step"] - inner_steps)


def _ends(tail: Tail) -> Iterator[tuple[Row, float]]:
    """Each round and its end in seconds since the peer began; all peers begin together."""
    return zip(tail.rounds, accumulate(sum(row["seconds"].values()) for row in tail.rounds), strict=True)


def _idle(rows: Sequence[Row]) -> float:
    idle = sum(row["seconds"]["match"] + row["seconds"]["exchange"] for row in rows)
    return idle / sum(sum(row["seconds"].values()) for row in rows)


def _step_seconds(tails: Sequence[Tail]) -> float:
    inner = sum(row["seconds"]["inner"] for tail in tails for row in tail.rounds)
    return inner / sum(tail.rounds[-1]["step"] for tail in tails)
