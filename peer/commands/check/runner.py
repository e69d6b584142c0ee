"""Runs the topics one after the other and prints each finding at once.

Every topic has its own deadlines. An error in a topic is a finding, and the next topics still run. What needs torch or
hivemind is imported after the findings that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from peer.commands.check.finding import Finding, Subject, fail
from peer.commands.check.local import identity, limits, port
from peer.config.schema import Config
from peer.errors import RunError, UserError, of_file, one_line


def topics(config: Subject, ranks: int, speed: bool) -> Iterator[tuple[str, Iterator[Finding]]]:
    """In the order of the lines. A program with its own loop chooses its device, memory and data itself."""
    yield "limits", limits()
    yield "port", port(config)
    yield "identity", identity(config)
    from peer.commands.check.network import network

    yield "network", network(config, speed=speed)
    if isinstance(config, Config):
        from peer.commands.check import training

        yield "device", training.device(config, ranks=ranks)
        yield "memory", training.memory(config, ranks=ranks)
        yield "disk", training.disk(config)
        yield "tokenizer", training.tokenizer(config)
        yield "push", training.push(config)


def run(config: Subject, say: Callable[[str], None], ranks: int = 1, *, speed: bool = False) -> int:
    """Print all findings and a verdict; returns the exit code, 0 when a peer of ``ranks`` GPUs can join."""
    found: list[Finding] = []
    for finding in findings(config, ranks, speed=speed):
        say(finding.line())
        found.append(finding)
    failed, warned = (sum(it.level == level for it in found) for level in ("fail", "warn"))
    if failed:
        say(f"this machine cannot join as it is: {failed} of {len(found)} checks failed")
        return 1
    warnings = f", with {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    say(f"this machine can join{warnings}")
    return 0


def findings(config: Subject, ranks: int = 1, *, speed: bool = False) -> Iterator[Finding]:
    """The findings of all topics; an error that would end ``train`` is a finding too."""
    for name, topic in topics(config, ranks, speed):
        try:
            yield from topic
        except (UserError, RunError, OSError) as error:
            if isinstance(error, PermissionError) and error.filename is not None:
                error = of_file(error)
            yield fail(name, one_line(error) if str(error) else "no answer in time", "correct this first")
