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
from peer.p2p.greeting import guest_node
from peer.p2p.node import Node, NodeSettings
from peer.swarm.directory.reader import Entry, Onlooker
from peer.swarm.directory.records import LIFETIME, MemberRecord

RunEntries = dict[str, Mapping[str, Entry]]
REFRESH_SECONDS = 2.0
STATUS_TIMEOUT = 20.0  # seconds to join, and to read all records
FIRST_RECORD_SECONDS = 15.0  # until the first record must be found
TABLE_WIDTH = 160  # columns, when there is no terminal
COLUMNS = (
    "peer",
    "state",
    "step",
    "round",
    "loss",
    "val loss",
    "idle",
    "tokens/s",
    "met last",
    "sees",
    "config",
    "age",
)
LEFT_ALIGNED = ("peer", "state", "met last", "config")


def run(initial_peers: Sequence[str], invitation: Path | None) -> int:
    """Show the swarm until interrupted, or once without a terminal. Raises :class:`RunError` for an empty swarm."""
    if not initial_peers:
        raise UserError("--initial-peers: give an address that noloco-bootstrap or a peer printed")
    loopback = all(address.startswith("/ip4/127.") for address in initial_peers)
    host = "127.0.0.1" if loopback else "0.0.0.0"
    settings = NodeSettings(None, host, 0, initial_peers=tuple(initial_peers), join_timeout=FIRST_RECORD_SECONDS)
    with guest_node(settings, invitation) as (node, _):
        node.call(node.join(node.connect(), client=True), STATUS_TIMEOUT)
        onlooker = Onlooker(node)
        found = _first(node, onlooker)
        if not found:
            raise RunError(f"nobody is there: {initial_peers[0]} answers, but no peer has written a record")
        if not sys.stdout.isatty():
            console = Console(width=TABLE_WIDTH)
            for table in _tables(found):
                console.print(table)
            return 0
        with Live(console=Console(), auto_refresh=False) as live:
            while not node.failure:
                grid = Table.grid()
                for table in _tables(found):
                    grid.add_row(table)
                live.update(grid, refresh=True)
                time.sleep(REFRESH_SECONDS)
                found = node.call(onlooker.look(), STATUS_TIMEOUT)
        raise RunError(node.failure)


def _first(node: Node, onlooker: Onlooker) -> RunEntries:
    until = time.monotonic() + FIRST_RECORD_SECONDS
    while True:
        found = {run: entries for run, entries in node.call(onlooker.look(), STATUS_TIMEOUT).items() if entries}
        if found or time.monotonic() > until:
            return found
        time.sleep(REFRESH_SECONDS / 4)


def _tables(found: RunEntries) -> Iterator[Table]:
    now = time.time()
    for run_name, entries in found.items():
        live = [entry for entry in entries.values() if entry.expires > now and entry.record.state != "left"]
        rate = sum(entry.record.tokens_per_second for entry in live)
        table = Table(title=Text(f"{run_name}: {len(live)} peers, {rate:.0f} tokens/s"))
        for heading in COLUMNS:
            table.add_column(heading, justify="left" if heading in LEFT_ALIGNED else "right")
        for entry in sorted(entries.values(), key=lambda entry: entry.record.name):
            age = max(0.0, now - entry.expires + LIFETIME)
            table.add_row(*(Text(cell) for cell in _row(entry.record, age)))  # Text: no markup in a name
        yield table


def _row(record: MemberRecord, age: float) -> list[str]:
    report = record.report
    return [
        _plain(record.name),
        record.state,
        str(record.step),
        str(record.round),
        _number(report.train_loss),
        _number(report.val_loss),
        f"{report.idle_seconds / report.seconds:.1%}" if report.seconds else "",
        f"{record.tokens_per_second:.0f}",
        _plain(", ".join(report.partners)),
        str(report.members or ""),
        _plain(record.config[:12]),
        f"{age:.0f} s",
    ]


def _plain(text: str) -> str:
    """A name from another peer without its control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
