"""A newcomer takes slow weights, momentum and step from a random member (the donor).

It uses verified parts only. When a donor is lost, the next one goes on after the last verified part. Replicas of NoLoCo
are near each other, so parts of two of them fit; for methods with equal replicas both donors must be at the same round.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Collection, Sequence

from torch import Tensor

from peer import clock
from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.p2p.deadline import Leaving, TooSlow, unless_away
from peer.p2p.greeting import OTHER_LAYOUT
from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.stream import BadMessage, StreamLost
from peer.rounds.state import State
from peer.rounds.transfer_rule import copy_limit, state_limit
from peer.rounds.types import Seat
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import MemberRecord
from peer.swarm.state_transfer.donor import STATE_LEAST, STATE_TIMEOUT
from peer.swarm.state_transfer.donors import DONOR_AHEAD, donors_of, plausible
from peer.swarm.state_transfer.download import DonorBehind, DonorBusy, PartialState, download

log = get_logger("join")

UP_TO_DATE_REQUESTS = 3  # donors that must have our last rounds: each copies its state before it answers
STOP_PERIOD = 0.2  # seconds between two looks at the request to stop
ASK_ALL_PAUSE = 1.0  # seconds between two rounds of asking all donors
LONGEST_WAIT = 4 * 3600.0  # seconds for donors that are busy
WAIT_LOG_PERIOD = 60.0  # seconds between two log lines about waiting
SHORT_PATIENCE = 80.0  # seconds that any state may take while there are other donors
SLOW_DONORS = 2  # donors that are left because they are slower; after them our own link counts as slow


def take_state(
    context: SwarmContext,
    room: Sequence[Tensor],
    timeout: float,
    *,
    above: int,
    reached: int = 0,
    among: Collection[str] = (),
    without: Collection[str] = (),
) -> State | None:
    """The verified state of a random member that is about as far as the median one; ``None`` when no member is beyond
    round ``above`` or this peer was asked to stop.

    ``room``: a flat fp32 host vector for each vector of the state; it is filled.
    ``reached``: see :func:`donors_of`.
    ``among``: ids of the only possible donors, whatever their round; ``without``: ids of impossible ones.
    ``timeout``: seconds of trying since the last part arrived or a donor was busy; with 0 all are asked once.
    Raises :class:`UserError` when the swarm trains another configuration or model, :class:`RunError` when no donor
    gives its state.
    """
    partial = PartialState(room)
    search, inner_steps = _DonorSearch(context, partial, timeout), context.inner_steps
    while True:
        try:
            present = context.members.refresh_all()
        except RunError as error:  # a line may be cut while a peer joins
            if context.stopping:
                return None
            search.failed(str(error))
            continue
        # a member with another configuration must not block the join; when all have another, the user must learn it
        ours = [it for it in present if it.config == context.node.member.config and it.peer_id not in without]
        believed = plausible(ours, inner_steps, context.tokens_per_step())
        if among:
            donors = [it for it in believed if it.peer_id in among]
        else:
            donors = donors_of(believed, above, reached) if ours or without else present
        if not (donors or present) and partial.have:  # nor does the directory answer: the line is cut
            search.failed("no member is found any more")
            continue
        if not donors:
            return None
        random.shuffle(donors)
        state = search.ask(donors, reached)
        if state is not None or context.stopping:
            return state
        search.failed("; ".join(search.reasons))


def take_from(
    context: SwarmContext,
    donor: Seat,
    room: Sequence[Tensor],
    timeout: float,
    most: tuple[float, float],
    least: int = 0,
) -> State | None:
    """The verified state of one member, which is asked again while it is busy: a group sends many members to one.

    ``None`` when it fails, takes more than ``timeout`` seconds or would at the rate that a quarter of them has shown,
    or when this peer stops or pauses. ``room``: as in :func:`take_state`. ``most``: the round and the step that it can
    have reached. Raises :class:`DonorBehind`, before any part comes, when it is not at round ``least``.
    """
    until = clock.monotonic() + timeout

    async def ask() -> State:
        while True:
            with contextlib.suppress(DonorBusy):
                left = until - clock.monotonic()
                return await download(context.node, donor, PartialState(room), least, most=most, within=left)
            await asyncio.sleep(ASK_ALL_PAUSE)

    try:
        return context.node.call(unless_away(ask(), lambda: context.away, 0.0, STOP_PERIOD), timeout)
    except Leaving:
        return None
    except (StreamLost, BadMessage, TimeoutError, RunError, UserError) as error:
        log.warning("donor failed: %s", fields(peer=donor.name, reason=str(error)))
        return None


class _DonorSearch:
    """Asks donors one after the other. ``reasons``: why none gave its state in the last :meth:`ask`."""

    def __init__(self, context: SwarmContext, partial: PartialState, timeout: float) -> None:
        self._context, self._node, self._partial = context, context.node, partial
        now = clock.monotonic()
        self._timeout, self._deadline, self._end = timeout, now + timeout, now + LONGEST_WAIT
        self._slow, self._most, self._logged = 0, 0, float("-inf")
        self.reasons: list[str] = []
        self._busy = False
        self._told: dict[str, str] = {}  # the last reason of each donor that failed

    def failed(self, why: str) -> None:
        """No state was given: wait a little before all are asked again. Raises :class:`RunError` after too long, and
        :class:`UserError` when all members have another model.
        """
        if self.reasons and all(it.endswith(OTHER_LAYOUT) for it in self.reasons):
            raise UserError(
                f"this model has other names or shapes of trained weights than the swarm's ({why[:300]}); train the "
                "same weights of the same model, or give this run another run.name"
            )
        if self._expired():
            raise RunError(f"no member gave its weights ({why[:300]}); try again, or look at their logs")
        clock.sleep(ASK_ALL_PAUSE)

    def _expired(self) -> bool:
        """Is it time to give up? Not while parts arrive or donors are busy, within bounds."""
        now, more = clock.monotonic(), self._partial.have > self._most
        self._most = max(self._most, self._partial.have)
        self._end = now + LONGEST_WAIT if more else self._end  # for busy donors, not for a download of hours
        if self._timeout and (self._busy or more):
            self._deadline = now + self._timeout if more else min(now + self._timeout, self._end)
            if self._busy and now - self._logged > WAIT_LOG_PERIOD:
                log.info("waiting for weights: the donors serve other newcomers")
                self._logged = now
        return now >= self._deadline

    def ask(self, donors: Sequence[MemberRecord], reached: int) -> State | None:
        """The state of the first donor that gives it; ``None`` when none does or this peer was stopped."""
        self.reasons, self._busy = [], False
        asked = deque((record, reached if place < UP_TO_DATE_REQUESTS else 0) for place, record in enumerate(donors))
        while asked and not self._context.stopping:
            record, least = asked.popleft()
            impatient = bool(asked) and self._slow < SLOW_DONORS
            patience = SHORT_PATIENCE if impatient else STATE_LEAST
            most = record.round + DONOR_AHEAD, record.step + DONOR_AHEAD * self._context.inner_steps
            work = download(self._node, record, self._partial, least, patience, most)
            size = self._partial.size
            longest = state_limit(size, patience) + OPEN_TIMEOUT + copy_limit(size, 0.0) + 4 * STATE_TIMEOUT
            try:
                return self._node.call(unless_away(work, lambda: self._context.stopping, 0.0, STOP_PERIOD), longest)
            except Leaving:
                return None
            except DonorBehind:
                asked.append((record, 0))  # later with no such demand: records are some seconds old
            except TooSlow as error:
                self._slow += 1
                self.reasons.append(f"{record.name}: {error}")
                if impatient:
                    asked.append((record, least))
                log.info("donor is slow: %s", fields(peer=record.name, parts=self._partial.have, reason=str(error)))
            except DonorBusy as error:
                self._busy = True
                self.reasons.append(f"{record.name}: {error}")
            except (StreamLost, BadMessage, TimeoutError, UserError) as error:
                if isinstance(error, UserError) and record.config != self._node.member.config:
                    raise
                reason = str(error) or "does not answer"
                self.reasons.append(f"{record.name}: {reason}")
                if self._told.get(record.peer_id) != reason:  # it is asked each second
                    log.warning("donor failed: %s", fields(peer=record.name, reason=reason, parts=self._partial.have))
                self._told[record.peer_id] = reason
                self._context.members.forget(record.peer_id)
        return None
