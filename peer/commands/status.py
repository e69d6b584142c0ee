"""``noloco-peer status``: the members of a swarm as a table, live on a terminal, printed once elsewhere.

noloco-peer status --initial-peers ADDRESS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peer.errors import RunError, UserError
from peer.p2p.greeting import guest_node, guest_settings
from peer.swarm.directory.reader import Entry, Onlooker
from peer.swarm.directory.records import LIFETIME, MemberRecord

REFRESH_SECONDS = 2.0
STATUS_TIMEOUT = 20.0  # seconds to join, and to read all records
FIRST_RECORD_SECONDS = 15.0  # until the first record must be found
TABLE_WIDTH = 160  # columns, when there is no terminal
LEFT_ALIGNED = ("peer", "state", "met last", "config")


def run(initial_peers: Sequence[str], invitation: Path | None) -> int:
    """Show the swarm until interrupted, or once without a terminal. Raises :class:`RunError` for an empty swarm."""
    if not initial_peers:
        raise UserError("--initial-peers: give an address that noloco-bootstrap or a peer printed")
    with guest_node(guest_settings(initial_peers, FIRST_RECORD_SECONDS), invitation) as (node, _):
        node.call(node.join(node.connect(), client=True), STATUS_TIMEOUT)
        onlooker = Onlooker(node)
        until = time.monotonic() + FIRST_RECORD_SECONDS
        while not (found := node.call(onlooker.look(), STATUS_TIMEOUT)):
            if time.monotonic() > until:
                raise RunError(f"nobody is there: {initial_peers[0]} answers, but no peer has written a record")
            time.sleep(REFRESH_SECONDS / 4)
        if not sys.stdout.isatty():
            console = Console(width=TABLE_WIDTH)
            for table in _tables(found):
                console.print(table)
            return 0
        with Live(console=Console(), auto_refresh=False) as live:
            while not node.failure:
                live.update(_screen(found), refresh=True)
                time.sleep(REFRESH_SECONDS)
                found = node.call(onlooker.look(), STATUS_TIMEOUT)
        raise RunError(node.failure)


def _screen(found: Mapping[str, Mapping[str, Entry]]) -> Table:
    grid = Table.grid()
    for row in _tables(found) if found else ["nobody is there any more"]:
        grid.add_row(row)
    return grid


def _tables(found: Mapping[str, Mapping[str, Entry]]) -> Iterator[Table]:
    """A table for each run; each has a record."""
    now = time.time()
    for run_name, entries in found.items():
        live = [entry for entry in entries.values() if entry.is_live(now)]
        rate = sum(entry.record.tokens_per_second for entry in live)
        table = Table(title=Text(f"{run_name}: {len(live)} peers, {rate:.0f} tokens/s"))
        ordered = sorted(entries.values(), key=lambda entry: entry.record.name)
        rows = [_row(entry.record, max(0.0, now - entry.expires + LIFETIME)) for entry in ordered]
        for heading in rows[0]:
            table.add_column(heading, justify="left" if heading in LEFT_ALIGNED else "right")
        for row in rows:
            table.add_row(*map(Text, row.values()))  # Text: no markup in a name
        yield table


def _row(record: MemberRecord, age: float) -> dict[str, str]:
    """A member's cells by their heading."""
    report = record.report
    return {
        "peer": record.name,
        "state": record.state,
        "step": str(record.step),
        "round": str(record.round),
        "loss": _number(report.train_loss),
        "val loss": _number(report.val_loss),
        "idle": f"{report.idle_seconds / report.seconds:.1%}" if report.seconds else "",
        "tokens/s": f"{record.tokens_per_second:.0f}",
        "met last": ", ".join(report.partners),
        "sees": str(report.members or ""),
        "config": record.config[:12],
        "age": f"{age:.0f} s",
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
