"""What a peer reports: rows of ``rounds.jsonl`` and ``evals.jsonl``, series, log lines, a part of its record."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peer import __version__, clock
from peer.logs import fields, get_logger
from peer.process import Pause
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome, Reason
from peer.swarm.directory.records import LARGEST_LOSS, Report
from peer.telemetry.metrics import Metrics
from peer.telemetry.run_log import EVALS, ROUNDS, RowWriter, read_rows
from peer.telemetry.series import IDLE_ACTIVITIES, running
from peer.telemetry.trackers import Trackers

log = get_logger("round")
PARTNERS_SHOWN = 3
RECENT = 20  # rounds: one call of a program's own loop ends two, and at the end of a run log2 N more
REFUSED_SHOWN = 2  # the peers that were refused most often


@dataclass(frozen=True)
class BoundaryReport:
    """A peer's position after a boundary, and the inner phase before it."""

    round: int
    step: int
    tokens: int
    inner: InnerReport


@dataclass(frozen=True)
class RoundReport:
    """One finished round. ``seconds``: by activity, since the last report."""

    boundary: BoundaryReport
    averaged: Averaged
    seconds: dict[str, float]
    idle_share: float
    members: int


class Moment(NamedTuple):
    """By the clock that a machine's sleep stops. ``rested``: seconds of all pauses until then."""

    monotonic: float
    rested: float

    def until(self, now: Moment) -> float:
        """Seconds, without the pauses between. The clocks of ``now`` were read one after the other."""
        return max(0.0, now.monotonic - self.monotonic - (now.rested - self.rested))


class Reporter:
    """Appends to the files in ``folder``; a resumed peer continues them. ``reached``: the last round there, or 0.
    ``recent``: the last of the ``count`` rounds of this process. ``pause``: its seconds do not count as time since the
    last merge and the last checkpoint.

    The training thread reports. The network thread reads :meth:`status`, so its fields are replaced as a whole.
    """

    def __init__(
        self, folder: Path, metrics: Metrics, trackers: Trackers | None = None, pause: Pause | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics, self._trackers = metrics, trackers or Trackers()
        self._status = Report(version=__version__[:24])
        self._pause = pause or Pause()
        self._merged: Moment | None = None  # the last merge
        self._saved: Moment | None = None  # the last checkpoint
        metrics["last_merge_timestamp_seconds"].set_function(lambda: self._unix(self._merged))
        metrics["last_checkpoint_timestamp_seconds"].set_function(lambda: self._unix(self._saved))
        self._refused: Counter[str] = Counter()
        self._rounds, self._evals = RowWriter(folder / ROUNDS), RowWriter(folder / EVALS)
        self.reached = max((row["round"] for row in read_rows(self._rounds.path)), default=0)
        self.count, self.recent = 0, deque[RoundReport](maxlen=RECENT)

    @property
    def last(self) -> RoundReport | None:
        return self.recent[-1] if self.recent else None

    def rewind(self, round: int, step: int) -> None:
        """Remove the rows after the state from which a peer resumes: the peer will repeat these rounds."""
        self._rounds.keep(lambda row: row["round"] <= round)
        self._evals.keep(lambda row: row["step"] <= step)
        self.reached = round

    def inner(self, report: InnerReport) -> None:
        """An inner phase ended, whether or not its round will be finished."""
        self._metrics["inner_steps_total"].inc(report.steps)
        self._metrics["tokens_total"].inc(report.tokens)
        if report.steps:
            self._note(tokens=self._status.tokens + report.tokens, train_loss=_told(report.loss))
            self._metrics["train_loss"].set(report.loss)
            self._metrics["learning_rate"].set(report.learning_rate)
            self._metrics["grad_norm"].set(report.grad_norm)

    def round(self, report: RoundReport) -> None:
        """A round ended."""
        boundary, averaged = report.boundary, report.averaged
        if boundary.round <= self.reached:  # the peer took the weights of a member with fewer rounds
            self.rewind(boundary.round - 1, boundary.step)
        self.reached, self.count = boundary.round, self.count + 1
        self.recent.append(report)
        row = _row(report)
        self._rounds.append(row)
        self._count(report)
        self._trackers.log(boundary.step, _tracked(report))
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
        failed = averaged.outcome.failed
        log.log(30 if failed else 20, "%s%s", line, f" detail={averaged.detail!r}" if failed else "")

    def _count(self, report: RoundReport) -> None:
        averaged, metrics = report.averaged, self._metrics
        metrics["rounds_total"].labels(averaged.outcome).inc()
        if averaged.reason is not None:
            metrics["refusals_total"].labels(averaged.reason).inc()
        metrics["unresolved_blocks_total"].inc(averaged.unresolved)
        metrics["round"].set(report.boundary.round)
        metrics["swarm_members"].set(report.members)
        metrics["exchange_bytes_total"].labels("sent").inc(averaged.bytes_sent)
        metrics["exchange_bytes_total"].labels("received").inc(averaged.bytes_received)
        if averaged.outcome is not Outcome.ALONE:
            metrics["exchange_duration_seconds"].observe(averaged.seconds)
        if averaged.outcome is Outcome.MERGED:
            partners = tuple(name[:64] for name in averaged.partners[:PARTNERS_SHOWN])
            self._merged = self._now()
            self._note(partners=partners, merges=self._status.merges + 1)
            if averaged.distance is not None:
                metrics["pair_distance"].set(averaged.distance)
            metrics["staleness_steps"].set(averaged.staleness)
        elif averaged.reason is not None:
            self._refused = self._refused + Counter(averaged.partners[:1])

    def undone(self, partner: str, detail: str) -> None:
        """The last merge was undone after its report: the training loss jumped."""
        log.warning("undid a merge: %s detail=%r", fields(partner=partner), detail)
        self._metrics["refusals_total"].labels(Reason.HARMFUL).inc()
        self._refused = self._refused + Counter([partner])

    def evaluation(self, step: int, tokens: int, loss: float, others: Mapping[str, float] | None = None) -> None:
        """A validation ended; ``others``: the losses on further sets, by name."""
        named = {f"val_loss_{name}": value for name, value in (others or {}).items()}
        self._metrics["val_loss"].set(loss)
        self._note(val_loss=_told(loss))
        self._evals.append({"step": step, "tokens": tokens, "val_loss": loss, **named})
        tracked = {f"val/loss_{name}": value for name, value in (others or {}).items()}
        self._trackers.log(step, {"val/loss": loss, **tracked, "tokens": tokens})
        log.info(fields(step=step, val_loss=loss, **named))

    def status(self, totals: Mapping[str, float], members: int) -> Report:
        """This peer's report for its record, for any thread. ``totals``: seconds by activity; ``members``: live."""
        merged = self._merged
        now = {
            "seconds": round(running(totals), 2),
            "idle_seconds": round(sum(totals[activity] for activity in IDLE_ACTIVITIES), 2),
            "members": members,
            "merged_ago": round(merged.until(self._now()), 1) if merged else None,
            "refused": tuple((name[:64], count) for name, count in self._refused.most_common(REFUSED_SHOWN)),
        }
        return self._status.model_copy(update=now)

    def _note(self, **values: Any) -> None:
        self._status = self._status.model_copy(update=values)

    def _now(self) -> Moment:
        return Moment(clock.monotonic(), self._pause.seconds)

    def _unix(self, moment: Moment | None) -> float:
        """Unix time of it, later by pauses and sleeps since; 0 before the first one."""
        return clock.unix() - moment.until(self._now()) if moment else 0.0

    def saved(self) -> None:
        """A checkpoint was written."""
        self._saved = self._now()


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
        "seconds": {activity: round(value, 6) for activity, value in report.seconds.items()},
        "idle_share": report.idle_share,
        "tokens_per_second": inner.tokens / inner.seconds if inner.seconds else 0.0,
        "bytes_sent": averaged.bytes_sent,
        "bytes_received": averaged.bytes_received,
        "distance": averaged.distance,
        "unresolved": averaged.unresolved,
        "staleness": round(averaged.staleness, 2),
    }


def _tracked(report: RoundReport) -> dict[str, float | None]:
    """The values for the trackers, by name."""
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
        **{f"seconds/{activity}": seconds for activity, seconds in report.seconds.items()},
    }


def _told(loss: float) -> float | None:
    """A loss as a record may have it."""
    return round(loss, 4) if abs(loss) <= LARGEST_LOSS else None
