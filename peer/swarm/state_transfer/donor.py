"""A member gives its slow weights, momentum and step to a newcomer.

    newcomer: StateRequest   donor: StateHeader | DonorFull, then parts, each with its digest   newcomer: StateReceived

The donor sends a snapshot, so that its own training goes on. A newcomer that has lost its donor says how many parts it
has already.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.budgets import STATE_REQUESTS, Spending
from peer.p2p.bulk.offer import BulkOffer, agree, offer
from peer.p2p.deadline import in_time
from peer.p2p.payload import fp32_parts, send_parts
from peer.p2p.stream import Message, Stream
from peer.rounds.backoff import Proven
from peer.rounds.contribution import Vector, parts
from peer.rounds.state import NO_ROUNDS, Lineage, Root, State
from peer.rounds.transfer_rule import CHECKS, LONGEST_REPEAT_PAUSE, answer_limit, state_limit
from peer.rounds.types import Count

log = get_logger("join")

STATE_PROTOCOL = "noloco/state"
STATE_TIMEOUT = 10.0  # seconds for one message
STATE_STALL = 10.0  # seconds without a byte
STATE_LEAST = 600.0  # seconds that any state may take; a large one takes longer
CLIENTS = 2  # newcomers served at once, each by one stream


class StateRequest(Message):
    """May I have your state, from part ``have`` on? Part numbers run through all vectors.

    Parts of one ``lineage`` do not fit those of another lineage or round.
    """

    kind: Literal["state_request"] = "state_request"
    have: Count = 0
    lineage: Lineage = NO_ROUNDS
    round: Count = 0
    bulk: BulkOffer | None = None


class StateHeader(Message):
    """``vectors`` vectors of ``numel`` fp32 elements follow from part ``first`` on: φ and, if any, momentum."""

    kind: Literal["state_header"] = "state_header"
    step: Count
    round: Count
    phase_steps_done: Count
    lineage: Lineage
    root: Root = ""
    vectors: Annotated[int, Field(ge=1, le=4)]
    numel: Annotated[int, Field(ge=1)]
    first: Count
    bulk: BulkOffer | None = None


class DonorFull(Message):
    """I serve as many newcomers as I can, or have given it to you often: ask me again later."""

    kind: Literal["full"] = "full"


class StateReceived(Message):
    """All vectors arrived; the donor may close."""

    kind: Literal["received"] = "received"


StateAnswer = StateHeader | DonorFull
STATE_ANSWER: TypeAdapter[StateAnswer] = TypeAdapter(Annotated[StateAnswer, Field(discriminator="kind")])


class Donor:
    """Serves this peer's state to newcomers. ``snapshot`` returns copies and may be called from any thread."""

    def __init__(self, snapshot: Callable[[], State], proven: Proven) -> None:
        self._snapshot, self._asked = snapshot, Spending(STATE_REQUESTS, proven)
        self._clients: set[str] = set()  # ids
        self._in_vain = -math.inf  # when one was last gone without the state, or told to ask again

    @property
    def awaited(self) -> bool:
        """Somebody takes this state, or has just gone without it and asks again: after ``LONGEST_REPEAT_PAUSE``, and
        half as long again for its request to come.
        """
        return bool(self._clients) or clock.monotonic() < self._in_vain + 1.5 * LONGEST_REPEAT_PAUSE

    async def serve(self, stream: Stream) -> None:
        """One newcomer's stream, from request to acknowledgement."""
        request = await stream.receive(StateRequest, STATE_TIMEOUT)
        if stream.remote in self._clients or len(self._clients) >= CLIENTS or not self._asked.spend(stream.remote):
            if self.awaited:  # it asks again too. Without that, mere questions would keep this peer
                self._in_vain = clock.monotonic()
            await stream.send_last(DonorFull(), STATE_TIMEOUT)
            return
        self._clients.add(stream.remote)
        try:
            await self._give(stream, request)
        except Exception:
            self._in_vain = clock.monotonic()
            raise
        finally:
            self._clients.discard(stream.remote)
            stream.close()

    async def _give(self, stream: Stream, request: StateRequest) -> None:
        state = await clock.in_thread(self._snapshot)
        numel = state.vectors[0].numel()
        each = len(parts(numel))
        goes_on = state.lineage == request.lineage and (not state.lineage.digest or state.round == request.round)
        first = request.have if goes_on and request.have < each * len(state.vectors) else 0
        size = 4 * sum(stop - start for start, stop in (len(state.vectors) * parts(numel))[first:])
        header = StateHeader(
            step=state.step,
            round=state.round,
            phase_steps_done=state.phase_steps_done,
            lineage=state.lineage,
            root=state.root,
            vectors=len(state.vectors),
            numel=numel,
            first=first,
            bulk=offer(stream, size) if request.bulk is not None else None,
        )
        await stream.send(header, STATE_TIMEOUT)
        await agree(stream, header.bulk, request.bulk)
        until = stream.all_sent + size
        limit, window = state_limit(size, STATE_LEAST), STATE_LEAST / CHECKS
        work = _send(stream, state, first, answer_limit(STATE_STALL, size))
        with stream.transferring():
            await in_time(work, lambda: {"sending": until - stream.all_sent}, limit, window)
        log.info("gave the state away: %s", fields(peer=stream.remote[-6:], step=state.step, first=first))


async def _send(stream: Stream, state: State, first: int, answer: float) -> None:
    """The parts from number ``first`` on; the newcomer acknowledges the last one within ``answer`` seconds."""
    await send_parts(stream, _parts(state, first), STATE_STALL)
    await stream.receive(StateReceived, answer)


async def _parts(state: State, first: int) -> AsyncIterator[bytes]:
    each = len(parts(state.vectors[0].numel()))
    for index, vector in enumerate(state.vectors):
        async for part in fp32_parts(Vector(vector), max(0, first - index * each)):
            yield part
