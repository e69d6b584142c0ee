"""Reads the rounds and evaluations of a peer from its files while they grow. It keeps sums and no rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from peer.rounds.types import Outcome
from peer.telemetry.run_log import EVALS, ROUNDS, Row, RunLog
from peer.telemetry.series import IDLE_ACTIVITIES, running


class Tail:
    """One peer's folder. ``last`` and ``last_eval``: the newest rows that were read; ``partners``: merges by partner;
    ``seconds``: all time of the finished rounds.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._rounds, self._evals = RunLog(folder / ROUNDS), RunLog(folder / EVALS)
        self._begin()
        self._first_eval: Row | None = None
        self.last_eval: Row | None = None

    def poll(self) -> list[Row]:
        """Read the new rows of both files; returns the new rounds."""
        evals = self._evals.poll()
        if self._evals.anew:
            self._first_eval = self.last_eval = None
        if evals:
            self._first_eval, self.last_eval = self._first_eval or evals[0], evals[-1]
        rounds = self._rounds.poll()
        if self._rounds.anew:
            self._begin()
        for row in rounds:
            self._add(row)
        return rounds

    def summary(self) -> Row:
        """This peer's part of ``summary.json``."""
        last, first, trained = self.last or {}, self._first_trained, self._last_trained
        return {
            "steps": last.get("step", 0),
            "tokens": last.get("tokens", 0),
            "first_train_loss": first["first_train_loss"] if first else None,
            "last_train_loss": trained["train_loss"] if trained else None,
            "first_val_loss": self._first_eval["val_loss"] if self._first_eval else None,
            "val_loss": self.last_eval["val_loss"] if self.last_eval else None,
            "rounds": {outcome.value: self._outcomes[outcome] for outcome in Outcome},
            "idle_share": self.idle_seconds / self.seconds if self.seconds else None,
            "partners": dict(sorted(self.partners.items())),
            "bytes_sent": self._bytes_sent,
            "bytes_received": self._bytes_received,
        }

    def _begin(self) -> None:
        self.last: Row | None = None
        # Of the rounds with an inner step: the first one of a peer that downloads a state at a boundary has none
        self._first_trained: Row | None = None
        self._last_trained: Row | None = None
        self.partners: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self.seconds = self.idle_seconds = 0.0
        self._bytes_sent = self._bytes_received = 0

    def _add(self, row: Row) -> None:
        self.last = row
        if row["train_loss"] is not None:
            self._first_trained, self._last_trained = self._first_trained or row, row
        self._outcomes[row["outcome"]] += 1
        if row["outcome"] == Outcome.MERGED:
            self.partners.update(row["partner"].split(","))
        self.seconds += running(row["seconds"])
        self.idle_seconds += sum(row["seconds"][activity] for activity in IDLE_ACTIVITIES)
        self._bytes_sent += row["bytes_sent"]
        self._bytes_received += row["bytes_received"]
