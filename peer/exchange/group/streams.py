"""Streams between all members of a group: the one with the smaller place dials, and both check what will follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from peer.exchange.codec import size, wrong_size
from peer.exchange.group.flow_control import FlowControlledStream
from peer.exchange.group.shown import Contradiction
from peer.exchange.group.wire import GroupFailure, Hello
from peer.exchange.pair.wire import Header
from peer.p2p.bulk.growth import MOST_CONNECTIONS
from peer.p2p.bulk.offer import agree, offer
from peer.p2p.deadline import together
from peer.p2p.greeting import MemberNode
from peer.p2p.payload import CorruptPart
from peer.p2p.stream import BadMessage, Refused, Stream, StreamLost
from peer.rounds.types import Assembly, Outcome

GroupResult = TypeVar("GroupResult")
REDUCE_PROTOCOL = "noloco/reduce"
HELLO_TIMEOUT = 5.0  # seconds
MOST_WAITING = 512  # incoming streams that were not taken yet


class Carried(NamedTuple):
    """What one member sends to another one in a round. ``size``: bytes in all."""

    payloads: int
    size: int


class IncomingStreams:
    """Streams that other members have opened before this peer takes them: they may have the roster earlier."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], tuple[Stream, Hello]] = {}  # by token and caller
        self._came = asyncio.Condition()

    async def accept(self, stream: Stream) -> None:
        """Handler of :data:`REDUCE_PROTOCOL`."""
        hello = await stream.receive(Hello, HELLO_TIMEOUT)
        async with self._came:
            if (before := self._waiting.pop((hello.token, stream.remote), None)) is not None:
                before[0].close()
            while len(self._waiting) >= MOST_WAITING:
                oldest = next(iter(self._waiting))
                self._waiting.pop(oldest)[0].close()
            self._waiting[hello.token, stream.remote] = (stream, hello)
            self._came.notify_all()

    async def take(self, token: str, peer_id: str, timeout: float) -> tuple[Stream, Hello]:
        """The stream of ``peer_id`` for the attempt ``token``. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout), self._came:
            await self._came.wait_for(lambda: (token, peer_id) in self._waiting)
            return self._waiting.pop((token, peer_id))

    def clear(self) -> None:
        """The round has ended: the remaining streams came too late."""
        for stream, _ in self._waiting.values():
            stream.close()
        self._waiting.clear()


class GroupStreams:
    """``by_place``: a stream to every other member, once :meth:`connect` has returned."""

    def __init__(
        self,
        network: MemberNode,
        incoming: IncomingStreams,
        assembly: Assembly,
        numel: int,
        stall: float,
        carried: Carried,
    ) -> None:
        self._network, self._incoming, self._stall, self._carried = network, incoming, stall, carried
        self.assembly, self._numel = assembly, numel
        self.by_place: dict[int, Stream] = {}
        self.flows: dict[int, FlowControlledStream] = {}

    async def connect(self, round: int) -> None:
        """Raises :class:`GroupFailure` with the member that was not reached or that expects another payload."""
        await self.with_all(lambda place: self._connect(place, round))

    def flow(self, place: int, left: int) -> FlowControlledStream:
        """The stream to the member at ``place``, from when on payloads are sent; it sends ``left`` bytes of them."""
        self.flows[place] = FlowControlledStream(self.by_place[place], self._stall, left)
        return self.flows[place]

    def left(self) -> dict[str, int]:
        """Bytes to come from each member that is amid a payload: between two it may wait for another member."""
        return {
            f"payload {flow.came + 1} of {self.name_of(place)} (member {place})": flow.left
            for place, flow in self.flows.items()
            if flow.coming
        }

    async def with_all(self, work: Callable[[int], Coroutine[Any, Any, GroupResult]]) -> dict[int, GroupResult]:
        """``work(place)`` with every other member at once; results by place. Raises :class:`GroupFailure`.

        Each begins with the member after it, so that nobody is called by all at once.
        """
        return dict(await together(self._blame(place, work) for place in self._others()))

    def _others(self) -> list[int]:
        """Places in the order in which this peer calls them."""
        count, me = len(self.assembly.seats), self.assembly.me
        return [(me + step) % count for step in range(1, count)]

    async def _blame(
        self, place: int, work: Callable[[int], Coroutine[Any, Any, GroupResult]]
    ) -> tuple[int, GroupResult]:
        """Each failure of ``work`` with a member becomes a :class:`GroupFailure`."""
        name = self.name_of(place)
        try:
            return place, await work(place)
        except TimeoutError:
            raise GroupFailure(place, Outcome.TIMEOUT, f"{name} does not answer") from None
        except Refused as error:
            raise GroupFailure(place, Outcome.REFUSED, f"{name}: {error}") from None
        except StreamLost as error:
            raise GroupFailure(place, Outcome.TIMEOUT, f"{name} is gone: {error}") from None
        except CorruptPart as error:
            raise GroupFailure(place, Outcome.CORRUPT, f"{name}: {error}") from None
        except BadMessage as error:
            raise GroupFailure(place, Outcome.CORRUPT, f"{name} does not speak the protocol: {error}") from None

    def require(self, condition: bool, place: int, detail: str) -> None:
        """Raises :class:`GroupFailure` unless ``condition`` holds; ``{}`` in ``detail`` is the name of the member."""
        if not condition:
            raise GroupFailure(place, Outcome.POISONED, detail.format(self.name_of(place)))

    def require_agreement(self, found: Contradiction | None) -> None:
        """Raises :class:`GroupFailure` for a contradiction between members."""
        if found is not None:
            names = [self.name_of(place) for place in (found.culprit, found.other) if place is not None]
            raise GroupFailure(found.culprit, Outcome.POISONED, found.text.format(*names), found.other)

    def slowest(self) -> int | None:
        """Place of the one member from which fewest payloads have come, else of the one that has not acknowledged one.
        ``None`` if there are several: they may wait for another one themselves.
        """
        came = {place: self.flows[place].came if place in self.flows else -1 for place in self._others()}
        behind = [place for place, count in came.items() if count == min(came.values())]
        for suspects in behind, [place for place, flow in self.flows.items() if flow.sending]:
            if len(suspects) == 1:
                return suspects[0]
        return None

    def name_of(self, place: int) -> str:
        return self.assembly.seats[place].name

    async def _connect(self, place: int, round: int) -> None:
        seat, me = self.assembly.seats[place], self.assembly.me
        # of the vector in fp32, whatever the codec: the greeting has compared the run, and with it the codec
        header = Header(payload_bytes=size("none", self._numel), round=round)
        most = max(1, MOST_CONNECTIONS // (len(self.assembly.seats) - 1))
        theirs: Hello | None = None
        if me < place:
            stream = await self._network.open_to_member(seat.peer_id, REDUCE_PROTOCOL, seat.addresses)
        else:
            stream, theirs = await self._incoming.take(self.assembly.token, seat.peer_id, self._stall)
        self.by_place[place] = stream
        direct = offer(stream, self._carried.size, self._carried.payloads, most)
        mine = Hello(token=self.assembly.token, index=me, header=header, bulk=direct)
        await stream.send(mine, self._stall)
        theirs = theirs or await stream.receive(Hello, self._stall)
        if (theirs.token, theirs.index) != (mine.token, place):
            raise BadMessage("it names another group")
        if refusal := wrong_size(theirs.header.codec, theirs.header.payload_bytes, self._numel):
            raise GroupFailure(place, Outcome.REFUSED, f"{seat.name}: {refusal}")
        await agree(stream, mine.bulk, theirs.bulk)
