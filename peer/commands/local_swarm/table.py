"""The live view of a local swarm: a table on a terminal, one line a round elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from peer.commands.local_swarm.tail import Tail
from peer.errors import tell
from peer.logs import fields
from peer.rounds.types import Outcome

OUTCOME_COLORS = {Outcome.MERGED: "green", Outcome.ALONE: "yellow"}


class SwarmView:
    """A context manager; call :meth:`show` after every poll."""

    def __init__(self, title: str, total_steps: int) -> None:
        self._title, self._total = title, total_steps
        self._live = Live(console=Console(), auto_refresh=False) if sys.stdout.isatty() else None

    def __enter__(self) -> SwarmView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, tails: Sequence[Tail], fresh: Sequence[tuple[Tail, dict[str, Any]]]) -> None:
        """``fresh``: rounds that have not been shown."""
        if self._live:
            self._live.update(self._table(tails), refresh=True)
            return
        for tail, row in fresh:
            tell(_line(tail, row))

    def say(self, line: str) -> None:
        """Print a line above the table."""
        if self._live:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            tell(line)

    def _table(self, tails: Sequence[Tail]) -> Table:
        table = Table(title=self._title)
        for heading in ("peer", "step", "loss", "val loss", "round", "partner", "last swap", "idle", "tokens/s"):
            table.add_column(heading, justify="left" if heading in ("peer", "partner", "last swap") else "right")
        for tail in tails:
            val_loss = f"{tail.last_eval['val_loss']:.3f}" if tail.last_eval else ""
            row = tail.last
            if row is None:
                table.add_row(tail.name, "", "", val_loss, "", "", "starting" if not tail.last_eval else "training")
                continue
            color = OUTCOME_COLORS.get(row["outcome"], "red")
            table.add_row(
                tail.name,
                f"{row['step']}/{self._total}",
                "" if row["train_loss"] is None else f"{row['train_loss']:.3f}",
                val_loss,
                str(row["round"]),
                row["partner"] or "",
                f"[{color}]{row['outcome']}[/]",
                f"{row['idle_share']:.1%}",
                f"{row['tokens_per_second']:.0f}",
            )
        return table


def _line(tail: Tail, row: dict[str, Any]) -> str:
    return fields(
        peer=tail.name,
        round=row["round"],
        step=row["step"],
        loss=row["train_loss"],
        partner=row["partner"],
        outcome=row["outcome"],
        idle=f"{row['idle_share']:.1%}",
        tok_s=f"{row['tokens_per_second']:.0f}",
        detail=repr(row["detail"]) if row["detail"] else None,
    )
