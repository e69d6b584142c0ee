"""Takes the state of a member: at the start, or later when this peer's weights cannot be averaged with the swarm's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from secrets import token_hex

from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.rounds.state import State
from peer.swarm.healing.late_join import STALE_ROUNDS
from peer.swarm.presence import Presence
from peer.telemetry.metrics import PhaseClock
from peer.training.outer_state import OuterState
from peer.training.validation import Validation

log = get_logger("joining")
ROOT_BYTES = 8
WORSE_RATIO = 1.25  # of this peer's loss: small validation sets are noisy
LEARNED_RATIO = 0.98  # of the loss of a uniform guess: noise may be a little better
DONORS = 3  # asked one after the other until one gives good weights


def catch_up(
    state: OuterState, presence: Presence, timeout: float, *, newcomer_above: int = 0, reached: int = 0
) -> None:
    """Take the state of a member in a later round, if there is one. A newcomer adopts it; a peer that has trained keeps
    its own change.

    ``reached``: the last round of this peer before its restart; its checkpoint may be older.
    """
    round = state.counters.round
    if state.inner.step:
        recent = reached - round <= STALE_ROUNDS and not state.outer.equal_replicas
        above = round + (STALE_ROUNDS if recent else 0)
    else:
        above = round + newcomer_above
    taken = presence.join(state.room(), timeout, above=above, reached=reached)
    if taken is not None and taken.round > above:
        (state.catch_up if state.inner.step else state.adopt)(taken)
    state.counters.root = state.counters.root or token_hex(ROOT_BYTES)
    alone = taken is None and not presence.others()
    presence.origin.note(alone=alone, round=state.counters.round, root=state.counters.root)


@dataclass(frozen=True)
class Others:
    """Members whose weights cannot be averaged with this peer's. Only ``ids`` are asked, if there are any."""

    why: str
    above: int  # their weights must be of a later round
    adopt: bool  # this peer does not keep its own change
    ids: Collection[str] = ()


def join_late(state: OuterState, presence: Presence, phase: PhaseClock, validation: Validation | None = None) -> bool:
    """At a boundary: take the weights of :class:`Others`, if there are any; returns whether it did.

    With ``validation`` only if these weights are good enough.
    """
    state.counters.root = presence.origin.root  # a partner may have changed it
    own = state.counters.round
    others = _others(own, presence, judged=validation is not None)
    if others is None:
        return False
    with phase("join"):
        taken = _state_of(others, state, presence, validation)
        if taken is not None:
            (state.adopt if others.adopt else state.catch_up)(taken)
            presence.origin.note(alone=False, round=state.counters.round, root=state.counters.root)
            log.warning("%s: took its weights: %s", others.why, fields(own_round=own, round=taken.round))
        presence.settle(others.ids, taken=taken is not None)
    return taken is not None


def _others(round: int, presence: Presence, *, judged: bool) -> Others | None:
    if presence.late(judged=judged):
        return Others("the swarm is older than this peer", round + STALE_ROUNDS, adopt=not presence.origin.since)
    ids = presence.diverged_from()
    return Others("this peer has nothing in common with the swarm", -1, adopt=True, ids=ids) if ids else None


def _state_of(others: Others, state: OuterState, presence: Presence, validation: Validation | None) -> State | None:
    bad: set[str] = set()
    while len(bad) < DONORS:
        try:  # a donor may be hostile: ask it once, and continue to train
            taken = presence.join(state.room(), 0.0, above=others.above, among=others.ids, without=bad)
        except (RunError, UserError) as error:
            log.warning("%s, and no member gives its weights: %s", others.why, error)
            return None
        if taken is None or validation is None or _good(taken, others, validation):
            return taken
        bad.add(taken.donor)
    return None


def _good(taken: State, others: Others, validation: Validation) -> bool:
    """A member in a later round must not have a much higher loss; the majority of a diverged swarm must be better than
    a guess.
    """
    loss = validation.loss_of(taken.vectors[0])
    limit = LEARNED_RATIO * validation.chance if others.ids else WORSE_RATIO * validation.own_loss()
    if loss >= limit:
        log.warning("%s, but the loss of these weights is too high: %s", others.why, fields(val_loss=loss, limit=limit))
    return loss < limit
