"""Runs the topics one after the other and prints a line for each finding as soon as it is known.

noloco-peer check --config configs/demo.yaml --initial-peers ADDRESS

Every topic has deadlines of its own, and one that breaks is a finding too: the others are still looked at. What takes
long to load (torch, hivemind) is loaded by the topics that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from peer.check.device import device
from peer.check.finding import Finding, fail
from peer.check.local import identity, limits, port
from peer.check.network import network
from peer.check.space import disk, memory
from peer.check.tokenizer import tokenizer
from peer.config import Config
from peer.errors import RunError, UserError

Topic = Callable[[Config], Iterator[Finding]]


def topics(ranks: int) -> tuple[tuple[str, Topic], ...]:
    """In the order of the lines."""
    return (
        ("limits", limits),
        ("port", port),
        ("identity", identity),
        ("network", network),
        ("device", partial(device, ranks=ranks)),
        ("memory", partial(memory, ranks=ranks)),
        ("disk", disk),
        ("tokenizer", tokenizer),
    )


def run(config: Config, say: Callable[[str], None], ranks: int = 1) -> int:
    """Print all findings and a verdict; the exit code, 0 when this machine can join with a peer of so many ranks."""
    found: list[Finding] = []
    for finding in findings(config, ranks):
        say(finding.line())
        found.append(finding)
    failed, warned = (sum(it.level == level for it in found) for level in ("fail", "warn"))
    if failed:
        say(f"this machine cannot join as it is: {failed} of {len(found)} checks failed")
        return 1
    warnings = f", with {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    say(f"this machine can join{warnings}")
    return 0


def findings(config: Config, ranks: int = 1) -> Iterator[Finding]:
    """All topics; the errors that would end ``train`` are findings here."""
    for name, topic in topics(ranks):
        try:
            yield from topic(config)
        except (UserError, RunError, TimeoutError) as error:
            said = " ".join(str(error).split()) or "no answer in time"
            yield fail(name, said, "correct this first")
