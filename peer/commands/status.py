"""``noloco-peer status``: the members of a swarm as a table, live on a terminal, printed once elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peer.errors import RunError, UserError
from peer.p2p.greeting import guest_node, guest_settings
from peer.swarm.directory.ended import ended_runs
from peer.swarm.directory.reader import WATCHED_RUNS, Entry, Onlooker
from peer.swarm.directory.records import LIFETIME

REFRESH_SECONDS = 2.0  # between two tables
RECORD_LOOK = 0.5  # seconds between two looks for the first record
JOIN_TIMEOUT = 60.0  # seconds
ALL_TOLD_TIMEOUT = 60.0  # seconds for all addresses to tell of runs that have ended: each has its own deadlines
FIRST_RECORD_SECONDS = 15.0  # until the first record must be found
TABLE_WIDTH = 160  # columns, when there is no terminal
LEFT_ALIGNED = ("peer", "state", "met last", "config")


def run(initial_peers: Sequence[str], invitation: Path | None) -> int:
    """Show the swarm until interrupted, or once without a terminal. Raises :class:`RunError` for an empty swarm."""
    if not initial_peers:
        raise UserError("status: give an ADDRESS that noloco-bootstrap or a peer printed (or NOLOCO_INITIAL_PEERS)")
    with guest_node(guest_settings(initial_peers, FIRST_RECORD_SECONDS), invitation) as (node, _):
        reached = node.connect()
        node.call(node.join(reached, client=True), JOIN_TIMEOUT)
        ended = node.call(ended_runs(node, reached), ALL_TOLD_TIMEOUT)
        onlooker, shown = Onlooker(node), LastFigures(ended)
        until = time.monotonic() + FIRST_RECORD_SECONDS
        while not (found := onlooker.read()) and not ended:
            if time.monotonic() > until:
                raise RunError(f"nobody is there: {initial_peers[0]} answers, but no peer has written a record")
            time.sleep(RECORD_LOOK)
        if not sys.stdout.isatty():
            Console(width=TABLE_WIDTH).print(*shown.tables(found, time.time()))
            return 0
        with Live(console=Console(), auto_refresh=False) as live:
            while not node.failure:
                live.update(Group(*shown.tables(found, time.time())), refresh=True)
                time.sleep(REFRESH_SECONDS)
                found = onlooker.read()
        raise RunError(node.failure)


class LastFigures:
    """What was seen last of each run: its figures stay after its end. ``ended``: what others have seen."""

    def __init__(self, ended: Mapping[str, tuple[float, Mapping[str, Entry]]]) -> None:
        self._last = dict(ended)  # by run: when it lived last, and with whom

    def tables(self, found: Mapping[str, Mapping[str, Entry]], now: float) -> Iterator[Table]:
        """A table for each run; those that have ended come last."""
        for run, entries in found.items():
            if any(entry.is_live(now) for entry in entries.values()):
                self._last[run] = now, entries
            else:
                self._last.setdefault(run, (0.0, entries))
        newest = sorted(self._last.items(), key=lambda item: -item[1][0])
        self._last = dict(newest[:WATCHED_RUNS])  # anybody can write names of runs
        for run, (at, entries) in self._last.items():
            yield _table(run, entries, at, now)


def _table(run: str, entries: Mapping[str, Entry], at: float, now: float) -> Table:
    """``entries``: those of the time ``at``, when the run lived last."""
    ordered = sorted(entries.values(), key=lambda entry: entry.record.name)
    live = [entry for entry in ordered if entry.is_live(now)]
    known = live or ordered
    rate = sum(entry.record.tokens_per_second for entry in known)
    peers = "1 peer" if len(known) == 1 else f"{len(known)} peers"
    title = f"{run}: {peers}, {rate:.0f} tokens/s"
    if not live:
        ended = max(at, *(entry.expires - LIFETIME for entry in ordered))
        title = f"{run}: ended {in_words(now - ended)} ago, these are its last figures: {peers}, {rate:.0f} tokens/s"
    rows = [_row(entry, now) for entry in ordered]
    table = Table(title=Text(title))
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in LEFT_ALIGNED else "right")
    for row in rows:
        table.add_row(*map(Text, row.values()))  # Text: no markup in a name
    return table


def in_words(seconds: float) -> str:
    """4 s, 3 min, 2 h 5 min, 3 days."""
    seconds = max(0.0, seconds)
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes / 1440:.0f} days"


def _row(entry: Entry, now: float) -> dict[str, str]:
    """A member's cells by their heading."""
    record, report = entry.record, entry.record.report
    return {
        "peer": record.name,
        "state": record.state if record.state == "left" or entry.is_live(now) else "lost",
        "step": str(record.step),
        "round": str(record.round),
        "loss": _number(report.train_loss),
        "val loss": _number(report.val_loss),
        "idle": f"{report.idle_seconds / report.seconds:.1%}" if report.seconds else "",
        "tokens/s": f"{record.tokens_per_second:.0f}",
        "met last": ", ".join(report.partners),
        "sees": str(report.members or ""),
        "config": record.config[:12],
        "heard": f"{in_words(now - entry.expires + LIFETIME)} ago",
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
