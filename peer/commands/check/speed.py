"""``--speed``: how fast is the line to some members, to each and to all at once? What that means is in swap_time.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from peer.commands.check.finding import Finding, Subject, ok, warn
from peer.commands.check.swap_time import Line, seconds_of_a_step, swap
from peer.config.schema import Config
from peer.errors import one_line
from peer.p2p.deadline import together
from peer.p2p.greeting import MemberNode
from peer.p2p.speed import Direction, LineSpeed, line_speed
from peer.p2p.stream import BadMessage, StreamLost
from peer.swarm.directory.records import MemberRecord

TEST_TIMEOUT = 60.0  # seconds for a test


def lines(
    node: MemberNode, config: Subject, some: Sequence[MemberRecord], of: Sequence[MemberRecord]
) -> Iterator[Finding]:
    """Measure with ``some`` of the members ``of`` this configuration."""
    if not some:
        yield ok("speed", "not measured: no member of this configuration is there to measure with")
        return
    found: list[tuple[MemberRecord, Line]] = []
    for record in some:
        one = _measured(node, [record])
        if isinstance(one, Line):
            found.append((record, one))
            yield ok("speed", f"{record.name}: {one}")
        else:
            yield warn("speed", f"{record.name}: {one}", "ask again, or read the lines above")
    if not found:
        return
    line = Line(*(median(it) for it in zip(*((it.up, it.down, it.trip) for _, it in found), strict=True)))
    all_at_once: Line | str = line
    if len(found) > 1:
        all_at_once = _measured(node, [record for record, _ in found])
        yield ok("speed", f"all {len(found)} at once: {all_at_once}")
    if isinstance(config, Config):
        from peer.replica.model import parameters_of

        whole = all_at_once if isinstance(all_at_once, Line) else line
        step = seconds_of_a_step(config.run, [it.tokens_per_second for it in of])
        yield from swap(config, parameters_of(config.run), line, whole, step, members=len(of) + 1)


def _measured(node: MemberNode, records: Sequence[MemberRecord]) -> Line | str:
    """The line to all of ``records`` at once, or why it could not be measured."""

    async def test(direction: Direction) -> list[LineSpeed]:
        return await together(line_speed(node.open, it.peer_id, it.addresses, direction) for it in records)

    try:
        up, down = (node.call(test(direction), TEST_TIMEOUT) for direction in ("up", "down"))
    except (StreamLost, BadMessage, TimeoutError) as error:
        return one_line(error) or "no answer in time"
    return Line(sum(it.rate for it in up), sum(it.rate for it in down), min(it.trip for it in (*up, *down)))
