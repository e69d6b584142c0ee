"""The figures of one run, by the same code for every method, from what the pacers of its peers have written."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from peer.rounds.types import Outcome
from tests.benchmarks.wan.processes import PeerRun
from tests.benchmarks.wan.stages import Stage
from tests.whole_tail import WholeTail

CURVE = 20  # inner steps for one point of the curve


def figures(stage: Stage, peers: Sequence[PeerRun]) -> dict[str, Any]:
    """Means over the peers; with a straggler over the faster ones, in all but the bytes.

    ``wall_seconds``    from a peer's first inner step until its last exchange has ended
    ``idle_share``      1 - (time in inner steps, at their set time) / wall
    ``end_seconds``     from the last inner step to the process's exit: last exchange, checkpoint, evaluation, leaving
    ``exchange_end_seconds``  the part of it until the last exchange has ended
    ``wire_bytes``      that a peer's device has sent in the whole run, with all headers
    ``payload_bytes``   of the swaps in it
    ``merged_share``    rounds that merged / rounds
    ``overran_share``   inner steps whose arithmetic took longer than their set time, because of this machine's load
    ``work_share``      of the set time that the arithmetic took
    ``middle_ratio``    time from the first inner step to the last one / the steps' set time

    A stage with drift has no losses.
    """
    fast = peers[:-1] if stage.straggler else peers
    told = [it.pacer for it in fast]
    walls = [it["over"] - it["first"] for it in told]
    steps = [len(it["ends"]) for it in told]
    if min(steps) != stage.steps:
        raise RuntimeError(f"a peer made {min(steps)} of {stage.steps} steps")
    paced = [count * it["pace"] for count, it in zip(steps, told, strict=True)]
    found = {
        "wall_seconds": mean(walls),
        "slowest_wall_seconds": max(walls),
        "idle_share": mean(1 - busy / wall for busy, wall in zip(paced, walls, strict=True)),
        "end_seconds": mean(it.exited - it.pacer["ends"][-1] for it in fast),
        "exchange_end_seconds": mean(it.pacer["over"] - it.pacer["ends"][-1] for it in fast),
        "wire_bytes": mean(it.sent for it in peers),
        "overran_share": sum(it["overran"] for it in told) / sum(steps),
        "work_share": sum(it["work"] for it in told) / sum(paced),
        "middle_ratio": mean((it["ends"][-1] - it["first"]) / busy for busy, it in zip(paced, told, strict=True)),
        "losses": [] if stage.drift else _curve(told),
    }
    tails = [it.tail for it in fast if it.tail is not None]
    found |= _of_tails(tails, peers) if tails else _of_library(told)
    if stage.drift:
        del found["val_loss"]
    return found


def _of_tails(tails: Sequence[WholeTail], peers: Sequence[PeerRun]) -> dict[str, Any]:
    rows = [row for tail in tails for row in tail.rounds]
    merged = [row for row in rows if row["outcome"] == Outcome.MERGED]
    everyone = [it.tail for it in peers if it.tail is not None]
    return {
        "val_loss": mean(tail.evals[-1]["val_loss"] for tail in tails),
        "rounds": len(rows) / len(tails),
        "merged_share": len(merged) / len(rows),
        "swap_bytes": mean(row["bytes_sent"] for row in merged) if merged else 0.0,
        "payload_bytes": mean(sum(row["bytes_sent"] for row in tail.rounds) for tail in everyone),
        "staleness_steps": mean(row["staleness"] for row in merged) if merged else 0.0,
        "outcomes": [[f"{row['step']}:{row['outcome']}:{row['partner']}" for row in tail.rounds] for tail in tails],
    }


def _of_library(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "val_loss": mean(it["val_loss"] for it in told),
        "rounds": mean(it["rounds"] for it in told),
        "merged_share": sum(it["merged"] for it in told) / max(1, sum(it["rounds"] for it in told)),
    }


def _curve(told: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Seconds since the first step and training loss, means over the peers and over ``CURVE`` steps."""
    return [
        (
            round(mean(it["ends"][stop - 1] - it["first"] for it in told), 2),
            round(mean(mean(it["losses"][stop - CURVE : stop]) for it in told), 4),
        )
        for stop in range(CURVE, min(len(it["ends"]) for it in told) + 1, CURVE)
    ]
