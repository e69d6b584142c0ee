"""A group of real group exchanges in one process; every fault is a hook."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from peer import clock
from peer.config.schema import ExchangeConfig
from peer.exchange.group.all_gather import AllGatherExchange
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.streams import IncomingStreams
from peer.p2p.bandwidth import UNLIMITED, Bandwidth
from peer.p2p.bulk.offer import BulkPort
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream, StreamLost
from peer.rounds.backoff import Proven
from peer.rounds.contribution import Averaged, Contribution, SparseContribution
from peer.rounds.types import Assembly, Group, Link, Seat
from tests.simulated.loop import Process
from tests.unit.exchange.pair_harness import FAST, WAIT
from tests.unit.virtual import End, line, virtual_time, within

T = TypeVar("T")
HOST = "127.0.0.1"
EXACT = FAST.model_copy(update={"codec": "none"})


@dataclass
class Member:
    """One peer: its process (in virtual time), thread and incoming streams. ``answers``: does it take calls?
    ``bulk``: its port for direct connections, if it has one.
    """

    name: str
    process: Process
    thread: LoopThread = field(default_factory=LoopThread)
    bandwidth: Bandwidth = UNLIMITED
    incoming: IncomingStreams = field(default_factory=IncomingStreams)
    answers: bool = True
    bulk: BulkPort | None = None

    def stream(self, end: tuple[asyncio.StreamReader, asyncio.StreamWriter], remote: str, *, called: bool) -> Stream:
        return Stream(*end, remote, not called, f"/ip4/{HOST}/tcp/4000", bandwidth=self.bandwidth, bulk_port=self.bulk)


class Wires:
    """The network of one member: dialling another one makes a line and hands it the other end."""

    def __init__(self, me: Member, members: Sequence[Member]) -> None:
        self._me, self._members = me, {member.name: member for member in members}

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        return self._me.thread.call(work, timeout)

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        other = self._members[peer_id]
        if not other.answers:
            raise StreamLost("connection refused")
        left, right = line(self._me.thread.loop)
        with within(other.process):
            asyncio.run_coroutine_threadsafe(self._arrive(other, right), other.thread.loop)
        return self._me.stream(await left(), peer_id, called=False)

    async def _arrive(self, other: Member, end: End) -> None:
        with contextlib.suppress(TimeoutError, StreamLost):
            await other.incoming.accept(other.stream(await end(), self._me.name, called=True))


def group_exchange(
    me: Member,
    members: Sequence[Member],
    numel: int,
    settings: ExchangeConfig,
    *,
    result: int | None = None,
    kept: Tensor | None = None,
) -> GroupProtocol[Any]:
    """The exchange of one of ``members``. ``result``: the contributions are sparse."""
    common: dict[str, Any] = {"network": Wires(me, members), "incoming": me.incoming, "settings": settings}
    if result:
        return AllGatherExchange(numel=numel, result=result, **common)
    return AllReduceExchange(numel=numel, kept=kept, **common)


class Many:
    """``count`` members named a, b, c, …; the first one convenes. ``result``: the contributions are sparse."""

    def __init__(
        self,
        count: int,
        numel: int,
        result: int | None = None,
        settings: ExchangeConfig = EXACT,
        phase_seconds: float = 0.0,
    ) -> None:
        names = [chr(ord("a") + index) for index in range(count)]
        self.members = [Member(name, Process(name)) for name in names]
        self.seats = tuple(Seat(member.name, f"peer-{member.name}") for member in self.members)
        self.kept = [torch.zeros(numel) if settings.feedback else None for _ in self.members]
        self.exchanges: list[GroupProtocol[Any]] = [
            group_exchange(member, self.members, numel, settings, result=result, kept=kept)
            for member, kept in zip(self.members, self.kept, strict=True)
        ]
        self.controls: list[dict[int, Stream]] = []
        self.tokens, self.phase_seconds = 0, phase_seconds

    def listen(self) -> None:
        """Direct connections are possible from now on."""
        for member in self.members:
            member.bulk = BulkPort(Proven(), member.thread.background)
            member.thread.call(self._start(member.bulk), WAIT)

    async def _start(self, port: BulkPort) -> None:
        port.start(HOST, 0, "auto", listens=True)

    def groups(self) -> list[Group]:
        """A new assembly: a control stream from the convener's loop to each member's."""
        self.tokens += 1
        self.controls = [{} for _ in self.members]
        for place, member in enumerate(self.members[1:], 1):
            left, right = line(member.thread.loop)
            self.controls[0][place] = self._stream(self.members[0], left, member.name)
            self.controls[place][0] = self._stream(member, right, self.members[0].name)
        return [
            Group(
                3,
                tuple(Link(seat.peer_id, seat.name) for seat in self.seats if seat.peer_id != member.name),
                Assembly(f"token-{self.tokens}", self.seats, place, self.controls[place], self.phase_seconds),
            )
            for place, member in enumerate(self.members)
        ]

    def average(
        self,
        contributions: Sequence[Contribution | SparseContribution],
        silent: Sequence[int] = (),
        groups: list[Group] | None = None,
    ) -> list[Averaged]:
        """All at once; those in ``silent`` do nothing, and have no result."""
        groups, futures = groups or self.groups(), {}
        for place, member in enumerate(self.members):
            if place not in silent:
                with within(member.process):
                    work = self.exchanges[place].average
                    futures[place] = clock.worker(member.name).submit(work, contributions[place], groups[place])
        return [clock.result(future, 600) for future in futures.values()]

    def _stream(self, owner: Member, end: End, remote: str) -> Stream:
        async def open_it() -> Stream:
            return Stream(*await end(), remote=remote, initiator=False)

        return owner.thread.call(open_it(), WAIT)

    def close(self) -> None:
        for member in self.members:
            member.process.frozen = False
            member.thread.close()


@contextlib.contextmanager
def many(
    count: int,
    numel: int,
    result: int | None = None,
    settings: ExchangeConfig = EXACT,
    *,
    phase_seconds: float = 0.0,
    real: bool = False,
) -> Iterator[Many]:
    """``phase_seconds``: of the leader; ``real``: with threads, over unix sockets, in real time."""
    with contextlib.nullcontext() if real else virtual_time():
        it = Many(count, numel, result, settings, phase_seconds)
        try:
            yield it
        finally:
            it.close()
