"""A newcomer takes slow weights, momentum and step from a random member; every member gives its own away (donor.py).

It uses nothing that is not verified. When a donor leaves in mid-way, the next one goes on after the last verified
part: replicas of NoLoCo are near each other, so parts of two of them are as good as a swap that broke off; for methods
whose replicas are equal both donors must be at the same round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from torch import Tensor

from peer.errors import RunError
from peer.logs import fields, get_logger
from peer.p2p.greeting import MemberNode
from peer.p2p.stream import BadMessage, StreamLost
from peer.rounds.state import State
from peer.swarm.directory.directory import Members
from peer.swarm.directory.records import MemberRecord
from peer.swarm.state_transfer.donor import STATE_TIMEOUT, TRANSFER_LIMIT
from peer.swarm.state_transfer.download import DonorBehind, DonorBusy, DonorSlow, PartialState, download

log = get_logger("join")

CHOOSY_REQUESTS = 3  # donors that are asked whether they have our last rounds: each copies its state to answer
STOP_PERIOD = 0.2  # seconds until a stop is heard
ASK_ALL_PAUSE = 1.0  # seconds between two rounds of asking everybody
LONGEST_JOIN = 4 * TRANSFER_LIMIT  # seconds
WAIT_LOG_PERIOD = 60.0  # seconds between two lines of log about it
PART_LIMIT = 20.0  # seconds for a part of 1 MiB while others can be asked
SLOW_DONORS = 2  # donors that are left for being slower than that; then it is our own link that is slow
NEAR_ROUNDS = 5  # rounds behind the furthest member: a state as good as its


def take_state(
    node: MemberNode,
    members: Members,
    room: Sequence[Tensor],
    timeout: float,
    *,
    above: int,
    reached: int = 0,
    among: Collection[str] = (),
    without: Collection[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> State | None:
    """A verified state of a random one of the furthest members; ``None`` when nobody is beyond round ``above``, and
    when this peer is ``stopped`` meanwhile.

    ``room``: a flat fp32 host vector for each vector of the state, to be filled. ``reached``: see :func:`donors_of`.
    ``among``: ids of the only ones that may be asked, however far they are; ``without``: of those that may not.
    ``timeout``: seconds of trying, from the last part that came and from when a donor last served others instead; with
    0 all are asked once.
    Raises :class:`UserError` when the swarm trains another configuration, :class:`RunError` when members are there
    and none of them gives its state.
    """
    partial = PartialState(room)
    search, deadline = _DonorSearch(node, members, partial, stopped), _JoinDeadline(timeout)
    while True:
        present = members.refresh_all()
        # a misconfigured stranger must not keep us from our own swarm, and our own mistake must be told
        ours = [it for it in present if it.config == node.member.config and it.peer_id not in without]
        if among:
            donors = [it for it in ours if it.peer_id in among]
        else:
            donors = donors_of(ours, above, reached) if ours or without else present
        if not donors:
            return None
        random.shuffle(donors)
        state = search.ask(donors, reached)
        if state is not None or stopped():
            return state
        if deadline.passed(partial.have, busy=search.busy):
            why = "; ".join(search.reasons)[:300]
            raise RunError(f"no member gave its weights ({why}); try again, or look at their logs")
        time.sleep(ASK_ALL_PAUSE)


class _JoinDeadline:
    """How long a newcomer tries: as long as parts come or donors are busy, within bounds."""

    def __init__(self, timeout: float) -> None:
        now = time.monotonic()
        self._timeout, self._deadline, self._end = timeout, now + timeout, now + LONGEST_JOIN
        self._most, self._said = 0, float("-inf")

    def passed(self, have: int, *, busy: bool) -> bool:
        """Is it time to give up? ``have``: parts. ``busy``: a donor serves other newcomers, and us when it has done."""
        now, more = time.monotonic(), have > self._most
        self._most = max(self._most, have)
        if self._timeout and (busy or more):
            self._deadline = min(now + self._timeout, self._end)
            if busy and now - self._said > WAIT_LOG_PERIOD:
                log.info("waiting for weights: who has them gives them to other newcomers")
                self._said = now
        return now >= self._deadline


class _DonorSearch:
    """Donors asked one after the other. ``reasons``: of the last :meth:`ask`, why none gave its state."""

    def __init__(self, node: MemberNode, members: Members, partial: PartialState, stopped: Callable[[], bool]) -> None:
        self._node, self._members = node, members
        self._partial, self._stopped = partial, stopped
        self._slow = 0
        self.reasons: list[str] = []
        self.busy = False

    def ask(self, donors: Sequence[MemberRecord], reached: int) -> State | None:
        """The first state that one of them gives; ``None`` also when this peer was stopped."""
        self.reasons, self.busy = [], False
        asked = deque((record, reached if place < CHOOSY_REQUESTS else 0) for place, record in enumerate(donors))
        while asked and not self._stopped():
            record, least = asked.popleft()
            try:
                return self._one(record, least, PART_LIMIT if asked and self._slow < SLOW_DONORS else TRANSFER_LIMIT)
            except DonorBehind:
                asked.append((record, 0))  # its record is some seconds old, as are those of others
            except DonorSlow:
                self._slow += 1
                asked.append((record, least))
                log.info("donor is slow, asking others: %s", fields(peer=record.name, parts=self._partial.have))
            except DonorBusy as error:
                self.busy = True
                self.reasons.append(f"{record.name}: {error}")
            except (StreamLost, BadMessage, TimeoutError) as error:
                self.reasons.append(f"{record.name}: {str(error) or 'does not answer'}")
                reason = fields(peer=record.name, reason=str(error), parts=self._partial.have)
                log.warning("donor failed: %s", reason)
                self._members.forget(record.peer_id)
        return None

    def _one(self, record: MemberRecord, least: int, part_limit: float) -> State | None:
        work = download(self._node, record, self._partial, least, part_limit)
        return self._node.call(_until_stopped(work, self._stopped), TRANSFER_LIMIT + STATE_TIMEOUT)


async def _until_stopped(work: Coroutine[Any, Any, State], stopped: Callable[[], bool]) -> State | None:
    task = asyncio.ensure_future(work)
    try:
        while not stopped():
            if (await asyncio.wait({task}, timeout=STOP_PERIOD))[0]:
                return await task
        return None
    finally:
        task.cancel()


def donors_of(records: Sequence[MemberRecord], above: int, reached: int) -> list[MemberRecord]:
    """Members beyond round ``above`` that are near the furthest, so that newcomers spread over many.

    ``reached``: the last round of a peer that comes back, 0 for a newcomer. It need not do again what others have.
    Among three or more a single one is not the measure: who claims a round that nobody has would be everybody's donor.
    """
    rounds = sorted(record.round for record in records) or [0]
    furthest = rounds[-2] if len(rounds) > 2 else rounds[-1]
    least = max(above + 1, furthest - NEAR_ROUNDS + 1, min(reached, furthest))
    return [record for record in records if record.round >= least]
