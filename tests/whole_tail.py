"""A peer's rounds and evaluations, all of them, for who looks at each."""

from __future__ import annotations

from pathlib import Path

from peer.commands.local_swarm.tail import Tail
from peer.telemetry.run_log import EVALS, ROUNDS, Row, RunLog


class _WholeLog(RunLog):
    """``rows``: all rows read so far, in the file's order."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.rows: list[Row] = []

    def poll(self) -> list[Row]:
        fresh = super().poll()
        if self.anew:
            self.rows.clear()
        self.rows += fresh
        return fresh


class WholeTail(Tail):
    """``rounds`` and ``evals``: the rows that were read so far."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        rounds, evals = _WholeLog(folder / ROUNDS), _WholeLog(folder / EVALS)
        self._rounds, self._evals, self.rounds, self.evals = rounds, evals, rounds.rows, evals.rows

    @property
    def trained(self) -> list[Row]:
        """Rounds with an inner step."""
        return [row for row in self.rounds if row["train_loss"] is not None]
