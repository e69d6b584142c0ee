"""A group of real group exchanges in one process: every stream is a unix socket pair, every fault is a hook."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from peer.config.schema import ExchangeConfig
from peer.exchange.group.all_gather import AllGatherExchange
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.streams import IncomingStreams
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream, StreamLost
from peer.rounds.contribution import Averaged, Contribution, SparseContribution
from peer.rounds.types import Assembly, Group, Link, Seat
from tests.unit.exchange.pair_harness import FAST

T = TypeVar("T")


async def stream_between(caller: str, called: str) -> tuple[Stream, Stream]:
    left, right = socket.socketpair()
    one, two = await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)
    return Stream(*one, remote=called, initiator=True), Stream(*two, remote=caller, initiator=False)


@dataclass
class Member:
    """One peer: its thread, its incoming streams, its exchange. ``answers``: does its side of a stream exist?"""

    name: str
    thread: LoopThread = field(default_factory=LoopThread)
    incoming: IncomingStreams = field(default_factory=IncomingStreams)
    answers: bool = True


class Wires:
    """The network of one member: dialling another one makes a socket pair and hands it the other end."""

    def __init__(self, me: Member, members: Sequence[Member]) -> None:
        self._me, self._members = me, {member.name: member for member in members}

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        return self._me.thread.call(work, timeout)

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        other = self._members[peer_id]
        if not other.answers:
            raise StreamLost("connection refused")
        left, right = socket.socketpair()
        asyncio.run_coroutine_threadsafe(self._arrive(other, right), other.thread.loop)
        return Stream(*await asyncio.open_connection(sock=left), remote=peer_id, initiator=True)

    async def _arrive(self, other: Member, end: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=end)
        with contextlib.suppress(TimeoutError, StreamLost):
            await other.incoming.accept(Stream(reader, writer, remote=self._me.name, initiator=False))


class Many:
    """``count`` members named a, b, c, …; the first one convenes. ``result``: the contributions are sparse."""

    def __init__(self, count: int, numel: int, result: int | None = None, settings: ExchangeConfig = FAST) -> None:
        kind: type[GroupProtocol[Any]] = AllGatherExchange if result else AllReduceExchange
        self.members = [Member(chr(ord("a") + index)) for index in range(count)]
        self.seats = tuple(Seat(member.name, f"peer-{member.name}") for member in self.members)
        self.exchanges = [
            kind(Wires(member, self.members), member.incoming, numel, result or numel, settings)
            for member in self.members
        ]
        self.pool = ThreadPoolExecutor(count)
        self.controls: list[dict[int, Stream]] = []
        self.tokens = 0

    def groups(self) -> list[Group]:
        """A new assembly: a control stream from the convener's loop to each member's."""
        self.tokens += 1
        self.controls = [{} for _ in self.members]
        for place, member in enumerate(self.members[1:], 1):
            left, right = socket.socketpair()
            self.controls[0][place] = self._stream(self.members[0], left, member.name)
            self.controls[place][0] = self._stream(member, right, self.members[0].name)
        return [
            Group(
                3,
                tuple(Link(seat.peer_id, seat.name) for seat in self.seats if seat.peer_id != member.name),
                Assembly(f"token-{self.tokens}", self.seats, place, self.controls[place]),
            )
            for place, member in enumerate(self.members)
        ]

    def average(
        self,
        contributions: Sequence[Contribution | SparseContribution],
        silent: Sequence[int] = (),
        groups: list[Group] | None = None,
    ) -> list[Averaged | None]:
        """All at once; those in ``silent`` do nothing."""
        groups = groups or self.groups()
        futures = [
            None
            if place in silent
            else self.pool.submit(self.exchanges[place].average, contributions[place], groups[place])
            for place in range(len(self.members))
        ]
        return [future.result(60) if future else None for future in futures]

    def _stream(self, owner: Member, end: socket.socket, remote: str) -> Stream:
        async def open_it() -> Stream:
            return Stream(*await asyncio.open_connection(sock=end), remote=remote, initiator=False)

        return owner.thread.call(open_it(), 5)

    def close(self) -> None:
        for member in self.members:
            member.thread.close()


@contextlib.contextmanager
def many(count: int, numel: int, result: int | None = None, settings: ExchangeConfig = FAST) -> Iterator[Many]:
    it = Many(count, numel, result, settings)
    try:
        yield it
    finally:
        it.close()


MakeMany = Callable[..., Many]
