"""What a peer writes down: one object a round in ``rounds.jsonl``, one an evaluation in ``evals.jsonl``, the
Prometheus series, and one line in the log.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from peer.logs import fields, get_logger
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome
from peer.telemetry.metrics import Metrics
from peer.telemetry.peer_status import PeerStatus
from peer.telemetry.run_log import EVALS, ROUNDS, read_rows
from peer.telemetry.trackers import Trackers

log = get_logger("round")


@dataclass(frozen=True)
class BoundaryReport:
    """Where a peer was after a boundary, and the inner phase before it."""

    round: int
    step: int
    tokens: int
    inner: InnerReport


@dataclass(frozen=True)
class RoundReport:
    """One finished round. ``seconds`` are by phase, since the last report."""

    boundary: BoundaryReport
    averaged: Averaged
    seconds: dict[str, float]
    idle_share: float
    members: int


class Reporter:
    """Appends to the run's folder, so that a resumed peer goes on in the same files. ``last``: of this process."""

    def __init__(self, folder: Path, metrics: Metrics, trackers: Trackers | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics, self._trackers = metrics, trackers or Trackers()
        self.status = PeerStatus()
        self._folder = folder
        self._open()
        self._reported = self.reached()
        self.last: RoundReport | None = None

    def reached(self) -> int:
        """The last round of this peer, before it is forgotten by :meth:`rewind`; 0 when there is none."""
        return max((row["round"] for row in read_rows(self._folder / ROUNDS)), default=0)

    def rewind(self, round: int, step: int) -> None:
        """Forget what came after the state that a peer resumes from; it will be done again."""
        self._close()
        _keep(self._folder / ROUNDS, lambda row: row["round"] <= round)
        _keep(self._folder / EVALS, lambda row: row["step"] <= step)
        self._open()
        self._reported = round

    def inner(self, report: InnerReport) -> None:
        """An inner phase ended, whether or not its round will be finished."""
        self._metrics["inner_steps_total"].inc(report.steps)
        self._metrics["tokens_total"].inc(report.tokens)
        if report.steps:
            self.status.inner(report.tokens, report.loss)
            self._metrics["train_loss"].set(report.loss)
            self._metrics["learning_rate"].set(report.learning_rate)
            self._metrics["grad_norm"].set(report.grad_norm)

    def round(self, report: RoundReport) -> None:
        """A round ended."""
        boundary, averaged = report.boundary, report.averaged
        if boundary.round <= self._reported:  # the peer has taken the weights of others that were less far
            self.rewind(boundary.round - 1, boundary.step)
        self._reported, self.last = boundary.round, report
        row, tracked = _row(report), _tracked(report)
        _append(self._rounds, row)
        self._count(report)
        self.status.round(averaged)
        self._trackers.log(boundary.step, tracked)
        line = fields(
            round=boundary.round,
            step=boundary.step,
            loss=boundary.inner.loss if boundary.inner.steps else None,
            outcome=averaged.outcome,
            partner=row["partner"],
            idle=f"{report.idle_share:.1%}",
            tok_s=f"{row['tokens_per_second']:.0f}",
            distance=averaged.distance,
        )
        failed = averaged.outcome not in (Outcome.MERGED, Outcome.ALONE)
        log.log(30 if failed else 20, "%s%s", line, f" detail={averaged.detail!r}" if failed else "")

    def _count(self, report: RoundReport) -> None:
        averaged, metrics = report.averaged, self._metrics
        metrics["rounds_total"].labels(averaged.outcome).inc()
        if averaged.reason is not None:
            metrics["refusals_total"].labels(averaged.reason).inc()
        metrics["round"].set(report.boundary.round)
        metrics["swarm_members"].set(report.members)
        metrics["exchange_bytes_total"].labels("sent").inc(averaged.bytes_sent)
        metrics["exchange_bytes_total"].labels("received").inc(averaged.bytes_received)
        if averaged.outcome is not Outcome.ALONE:
            metrics["exchange_duration_seconds"].observe(averaged.seconds)
        if averaged.outcome is Outcome.MERGED:
            if averaged.distance is not None:
                metrics["pair_distance"].set(averaged.distance)
            metrics["staleness_steps"].set(averaged.staleness)
            metrics["last_merge_timestamp_seconds"].set(time.time())

    def evaluation(self, step: int, tokens: int, loss: float, others: Mapping[str, float] | None = None) -> None:
        """A validation ended; ``others``: the losses on further sets, by name."""
        named = {f"val_loss_{name}": value for name, value in (others or {}).items()}
        self._metrics["val_loss"].set(loss)
        self.status.evaluation(loss)
        _append(self._evals, {"step": step, "tokens": tokens, "val_loss": loss, **named})
        tracked = {f"val/loss_{name}": value for name, value in (others or {}).items()}
        self._trackers.log(step, {"val/loss": loss, **tracked, "tokens": tokens})
        log.info(fields(step=step, val_loss=loss, **named))

    def replaced(self) -> None:
        """This peer goes on with the weights of others."""
        self._metrics["weights_taken_total"].inc()

    def saved(self) -> None:
        """A checkpoint was written."""
        self._metrics["last_checkpoint_timestamp_seconds"].set(time.time())

    def _open(self) -> None:
        self._rounds = (self._folder / ROUNDS).open("a", encoding="utf-8", buffering=1)
        self._evals = (self._folder / EVALS).open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the files."""
        self._close()
        self._trackers.close()

    def _close(self) -> None:
        self._rounds.close()
        self._evals.close()


def _row(report: RoundReport) -> dict[str, Any]:
    """A line of ``rounds.jsonl``."""
    boundary, inner, averaged = report.boundary, report.boundary.inner, report.averaged
    return {
        "round": boundary.round,
        "step": boundary.step,
        "tokens": boundary.tokens,
        "first_train_loss": inner.first_loss,
        "train_loss": inner.loss,
        "partner": ",".join(averaged.partners) or None,
        "outcome": averaged.outcome,
        "detail": averaged.detail,
        "reason": averaged.reason,
        "seconds": {phase: round(value, 6) for phase, value in report.seconds.items()},
        "idle_share": report.idle_share,
        "tokens_per_second": inner.tokens / inner.seconds if inner.seconds else 0.0,
        "bytes_sent": averaged.bytes_sent,
        "bytes_received": averaged.bytes_received,
        "distance": averaged.distance,
        "staleness": round(averaged.staleness, 2),
    }


def _tracked(report: RoundReport) -> dict[str, float | None]:
    """By the names that the trackers show."""
    inner, averaged = report.boundary.inner, report.averaged
    trained = {"train/loss": inner.loss, "train/lr": inner.learning_rate, "train/grad_norm": inner.grad_norm}
    return {
        **(trained if inner.steps else {}),
        "tokens": report.boundary.tokens,
        "outer/round": report.boundary.round,
        "outer/merged": averaged.outcome is Outcome.MERGED,
        "outer/idle_share": report.idle_share,
        "outer/distance": averaged.distance,
        "outer/bytes": averaged.bytes_sent + averaged.bytes_received,
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
    }


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the wanted rows."""
    kept = [json.dumps(row) + "\n" for row in read_rows(path) if wanted(row)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _append(file: TextIO, row: dict[str, Any]) -> None:
    row = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    file.write(json.dumps(row, allow_nan=False) + "\n")
