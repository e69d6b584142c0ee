"""Writes this peer's record to the DHT and reads those of the others: a bounded number of buckets a period."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from peer import clock
from peer.errors import RunError, one_line
from peer.logs import get_logger
from peer.p2p.addresses import is_circuit
from peer.p2p.dht.join import get_in_touch, neighbours
from peer.p2p.node import RPC_TIMEOUT, Node
from peer.swarm.directory import buckets as directory
from peer.swarm.directory import records
from peer.swarm.directory.buckets import Bucket
from peer.swarm.directory.reader import BEAM, LOOKS, Reader
from peer.swarm.directory.records import MemberRecord

log = get_logger("members")

MET_LIFETIME = 2 * records.LIFETIME  # seconds, at least, for which a partner stays a candidate without a record


def present_members(node: Node, run: str) -> list[MemberRecord]:
    """The live members of ``run``, for a node that is none yet. Raises :class:`RunError`. From the main thread."""

    def nothing() -> MemberRecord:
        raise AssertionError("it announces nothing")

    return Members(node, run, nothing).refresh_all()


class Members:
    """Announces this peer and lists the others. ``describe`` makes this peer's current record."""

    def __init__(self, node: Node, run: str, describe: Callable[[], MemberRecord]) -> None:
        self._node, self._run, self._describe = node, run, describe
        self._reader = Reader(node, run)
        self._expiration = 0.0
        self._written: list[Bucket] = []

    # -- from the main thread

    def start(self) -> None:
        """Announce from now on, until :meth:`leave`."""
        self._node.spawn(self._keep_announcing())

    def refresh_all(self) -> list[MemberRecord]:
        """Read many buckets now, all of a small swarm; returns the live members without this peer.

        Raises :class:`RunError` when too few nodes answer.
        """
        try:
            self._node.call(self._reader.look_around(directory.WELCOME), LOOKS * 8 * RPC_TIMEOUT)
        except TimeoutError:
            raise RunError("the swarm's directory does not answer") from None
        return self.live()

    def announce(self) -> None:
        """Write this peer's record now."""
        self._node.call(self._store(self._describe()), 2 * RPC_TIMEOUT)

    def leave(self) -> None:
        """Withdraw this peer's record, so that no member looks for it."""
        gone = self._describe().model_copy(update={"state": "left"})
        self._node.call(self._store(gone), 2 * RPC_TIMEOUT)

    # -- from any thread

    def live(self, *, since: float = 0.0) -> list[MemberRecord]:
        """Members other than this peer with a valid record that was written after ``since`` (unix seconds).

        The record of a killed peer stays valid for ``records.LIFETIME``.
        """
        after = max(clock.unix(), since + records.LIFETIME)
        return [entry.record for entry in list(self._reader.known.values()) if entry.is_live(after)]

    def candidates(self) -> list[MemberRecord]:
        """As :meth:`live`, and those met lately even if their records are not found: others may fill the directory."""
        now, kept = clock.unix(), self._reader.kept
        return [
            entry.record
            for peer_id, entry in list(self._reader.known.items())
            if entry.is_live(now) or (kept.get(peer_id, 0.0) > now and entry.record.state != "left")
        ]

    def keep(self, peer_id: str, seconds: float) -> None:
        """A swap with this member has succeeded: it stays a candidate, until it fails to answer."""
        self._reader.kept[peer_id] = clock.unix() + max(seconds, MET_LIFETIME)

    def name_of(self, peer_id: str) -> str:
        """The name in its record, or the end of its id."""
        known = self._reader.known.get(peer_id)
        return known.record.name if known is not None else peer_id[-6:]

    def taken_by(self, peer_id: str) -> int:
        """How often it has taken the weights of others, by its record."""
        known = self._reader.known.get(peer_id)
        return known.record.taken if known is not None else 0

    def forget(self, peer_id: str) -> None:
        """Drop a member that does not answer until its next record is read."""
        self._reader.kept.pop(peer_id, None)
        self._reader.known.pop(peer_id, None)

    # -- on the network thread

    async def _keep_announcing(self) -> None:
        while True:
            began = clock.monotonic()
            work = self._store(self._describe()), self._reader.look(directory.READS), self._get_to_know()
            done = await asyncio.gather(*work, return_exceptions=True)
            for error in done:  # hivemind raises many types; the next period may succeed
                if isinstance(error, BaseException):
                    log.warning("the directory does not answer, trying again: %s", one_line(error))
            pause = records.ANNOUNCE_SECONDS * random.uniform(0.8, 1.2) - (clock.monotonic() - began)
            await asyncio.sleep(max(0.5, pause))

    async def _get_to_know(self) -> None:
        """One member that our DHT does not know, as long as it knows few: who told us of both may be gone."""
        known = neighbours(self._node.dht)
        dialled = [it for it in self.live() if it.peer_id not in known and not any(map(is_circuit, it.addresses))]
        if dialled and len(known) < BEAM:
            member = self._reader.chance.choice(dialled)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RPC_TIMEOUT):
                    await get_in_touch(self._node.p2p, self._node.dht, member.peer_id, member.addresses)

    async def _store(self, record: MemberRecord) -> None:
        # the DHT rejects a record that does not expire later than the one that it replaces
        self._expiration = max(clock.unix() + records.LIFETIME, self._expiration + 0.01)
        before, self._written = self._written, directory.writes(self._node.peer_id, self._reader.members)
        buckets = {*before, *self._written} if record.state == "left" else self._written
        text = records.encode(record)
        stored = {records.members_key(self._run, bucket): (text, self._expiration) for bucket in buckets}
        if self._reader.chance.random() * self._reader.members < records.RUNS_WRITERS and record.state != "left":
            stored[records.RUNS] = (self._run, self._expiration - records.LIFETIME + records.RUNS_LIFETIME)
        async with asyncio.timeout(2 * RPC_TIMEOUT):
            await self._node.dht.store_many(
                list(stored),
                [value for value, _ in stored.values()],
                expiration_time=[expires for _, expires in stored.values()],
                subkeys=[self._node.subkey] * len(stored),
                beam_size=BEAM,
            )
