"""Reads the rounds and evaluations of a peer from its files while they grow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from peer.rounds.types import Outcome
from peer.telemetry.run_log import EVALS, ROUNDS, Row, RunLog
from peer.telemetry.series import IDLE_PHASES, running


class Tail:
    """One peer's folder. ``rounds`` and ``evals``: the rows that were read so far."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._rounds, self._evals = RunLog(folder / ROUNDS), RunLog(folder / EVALS)
        self.rounds, self.evals = self._rounds.rows, self._evals.rows

    def poll(self) -> list[Row]:
        """Read the new rows of both files; returns the new rounds."""
        self._evals.poll()
        return self._rounds.poll()

    @property
    def partners(self) -> Counter[str]:
        """Merges by partner."""
        merged = [row for row in self.rounds if row["outcome"] == Outcome.MERGED]
        return Counter(name for row in merged for name in row["partner"].split(","))

    @property
    def trained(self) -> list[Row]:
        """Rounds with an inner step. The first round of a peer that downloads a state at a boundary has none."""
        return [row for row in self.rounds if row["train_loss"] is not None]

    @property
    def seconds(self) -> float:
        """All time of the finished rounds."""
        return sum(running(row["seconds"]) for row in self.rounds)

    @property
    def idle_seconds(self) -> float:
        return sum(row["seconds"][phase] for row in self.rounds for phase in IDLE_PHASES)

    def summary(self) -> Row:
        """This peer's part of ``summary.json``."""
        last = self.rounds[-1] if self.rounds else {}
        trained = self.trained
        outcomes = Counter(row["outcome"] for row in self.rounds)
        return {
            "steps": last.get("step", 0),
            "tokens": last.get("tokens", 0),
            "first_train_loss": trained[0]["first_train_loss"] if trained else None,
            "last_train_loss": trained[-1]["train_loss"] if trained else None,
            "first_val_loss": self.evals[0]["val_loss"] if self.evals else None,
            "val_loss": self.evals[-1]["val_loss"] if self.evals else None,
            "rounds": {outcome.value: outcomes[outcome] for outcome in Outcome},
            "idle_share": self.idle_seconds / self.seconds if self.seconds else None,
            "partners": dict(sorted(self.partners.items())),
            "bytes_sent": sum(row["bytes_sent"] for row in self.rounds),
            "bytes_received": sum(row["bytes_received"] for row in self.rounds),
        }
