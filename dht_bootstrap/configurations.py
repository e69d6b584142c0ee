"""The configuration of each run, read from its members as any onlooker does and kept by its digest.

It is the one that more than half of a run's records name. A member's answer counts only when it has that digest.
Newcomers get it here too: members that everybody must call first may be out of their reach.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from dht_bootstrap.history import RunHistory
from dht_bootstrap.watch import Watch
from peer.config.received import OwnProgram, received
from peer.errors import UserError, one_line
from peer.logs import fields, get_logger
from peer.p2p.deadline import together
from peer.p2p.greeting import Greeting, MemberIdentity
from peer.p2p.stream import MESSAGE_TIMEOUT, Refusal, Stream
from peer.swarm.configuration import ask, most_common
from peer.swarm.directory.records import MemberRecord

log = get_logger("configurations")
ASK_PERIOD = 2.0  # seconds between two looks at what is unknown; in each of them every run has one member asked


class ReadRun(NamedTuple):
    """``run``: the sections, as JSON values; ``None`` when they are not shown, and ``why``."""

    run: dict[str, Any] | None
    why: str = ""
    own_program: bool = False  # its members train by a program of their own, so nobody can join by a command alone


class Configurations:
    """What the page says about joining each run. Call :meth:`view` with the lock of ``watch``."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        # canonical texts and what they say, by name of the run and digest
        self._read: dict[tuple[str, str], tuple[str, ReadRun]] = {}

    def view(self, name: str, run: RunHistory) -> dict[str, Any] | None:
        """For ``/swarm.json``; ``None`` without a digest of most members."""
        records = run.members()
        digest = most_common(records)
        if digest is None:
            return None
        agreeing = sum(record.config == digest for record in records)
        _, read = self._read.get((name, digest), ("", ReadRun(None, "it was not read yet")))
        return {"digest": digest, "agreeing": agreeing, **read._asdict()}

    async def read_on(self) -> None:
        """Ask members for what is unknown, until cancelled, on the node's thread."""
        while True:
            await asyncio.sleep(ASK_PERIOD)
            with self._watch.lock:
                runs = {name: run.members() for name, run in self._watch.runs.items()}
            await self.learn(runs)

    async def learn(self, runs: Mapping[str, list[MemberRecord]]) -> None:
        """Ask one member of each run whose configuration is unknown, and forget those that nobody has any more."""
        wanted = {(name, digest) for name, records in runs.items() if (digest := most_common(records)) is not None}
        self._read = {key: read for key, read in self._read.items() if key in wanted}
        unknown = [(name, digest, runs[name]) for name, digest in sorted(wanted - self._read.keys())]
        await together(self._learn(*it) for it in unknown)  # anybody can invent a run whose members are silent

    async def _learn(self, name: str, digest: str, records: list[MemberRecord]) -> None:
        """Its error is not that of the other runs."""
        record = random.choice([it for it in records if it.config == digest])
        try:
            text = await ask(self._watch.node, name, digest, record.peer_id, record.addresses)
            if isinstance(text, str):
                self._read[name, digest] = text, _checked(name, text)
        except Exception as error:  # noqa: BLE001 - the page goes on without
            log.warning("a configuration was not read: %s", fields(run=name, reason=one_line(error)))

    async def tell(self, stream: Stream) -> None:
        """Refuse the greeting of a newcomer as a member does, with the configuration of the run that it names."""
        greeting = await stream.receive(Greeting, MESSAGE_TIMEOUT)
        refusal = None
        for (name, digest), (text, _) in self._read.items():
            if name == greeting.run:
                refusal = MemberIdentity("", name, digest, text, layout="").refusal(greeting)
        unknown = Refusal(reason="it has not read the configuration of that run")
        await stream.send_last(refusal or unknown, MESSAGE_TIMEOUT)


def _checked(name: str, text: str) -> ReadRun:
    try:
        tree = received(text).tree
    except OwnProgram as error:
        return ReadRun(None, str(error), own_program=True)
    except UserError as error:
        return ReadRun(None, str(error))
    return ReadRun(tree) if tree["name"] == name else ReadRun(None, "it is that of another run")
