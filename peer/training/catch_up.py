"""How a peer's state becomes a member's: when it starts, or later if it cannot be averaged with the others'.

Previous stations: outer_state.py and swarm/presence.py. Next station: member.py.
"""

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
WORSE_RATIO = 1.25  # times one's own loss: small validation sets are noisy
LEARNED_RATIO = 0.98  # times the loss of a model that only guesses: noise may guess a little better
DONORS = 3  # that are asked, one after the other, while their weights are no good


def catch_up(
    state: OuterState, presence: Presence, timeout: float, *, newcomer_above: int = 0, reached: int = 0
) -> None:
    """Take over the state of a member that is further, if there is one. A newcomer takes it whole; a peer that resumes
    from a checkpoint older than its last merges keeps what it has trained.

    ``reached``: the last round that this peer has made, if it comes back: its checkpoint may be older.
    """
    round = state.counters.round
    if state.inner.step:
        little = reached - round <= STALE_ROUNDS and not state.outer.equal_replicas
        above = round + (STALE_ROUNDS if little else 0)
    else:
        above = round + newcomer_above
    taken = presence.join(state.room(), timeout, above=above, reached=reached)
    if taken is not None and taken.round > above:
        (state.catch_up if state.inner.step else state.adopt)(taken)
    state.counters.root = state.counters.root or token_hex(ROOT_BYTES)
    _begin(state, presence, alone=taken is None and not presence.others())


@dataclass(frozen=True)
class Others:
    """Members whose weights cannot be averaged with this peer's, and why. Only ``ids`` are asked, if there are any."""

    why: str
    above: int  # round
    anew: bool  # nothing of what this peer has trained is kept
    ids: Collection[str] = ()


def join_late(state: OuterState, presence: Presence, phase: PhaseClock, validation: Validation | None = None) -> bool:
    """At a boundary: take over the weights of :class:`Others`, if there are any; returns whether it did.

    With ``validation`` only if these weights are good enough.
    """
    state.counters.root = presence.origin.root  # perhaps that of a peer we met: for our checkpoints and newcomers
    others, own = _others(state.counters.round, presence, judged=validation is not None), state.counters.round
    if others is None:
        return False
    with phase("join"):
        taken = _state_of(others, state, presence, validation)
        if taken is not None:
            (state.adopt if others.anew else state.catch_up)(taken)
            _begin(state, presence)
            log.warning("%s: took its weights: %s", others.why, fields(own_round=own, round=taken.round))
        presence.settle(others.ids, taken=taken is not None)
    return taken is not None


def _others(round: int, presence: Presence, *, judged: bool) -> Others | None:
    if presence.late(judged=judged):
        anew = not presence.origin.since
        return Others("the swarm was there before", above=round + STALE_ROUNDS, anew=anew)
    strangers = presence.diverged_from()
    return Others("this peer has nothing in common with the swarm", -1, True, strangers) if strangers else None


def _state_of(others: Others, state: OuterState, presence: Presence, validation: Validation | None) -> State | None:
    bad: set[str] = set()
    while len(bad) < DONORS:
        try:  # a donor may be hostile: it is asked once, and training goes on
            taken = presence.join(state.room(), 0.0, above=others.above, among=others.ids, without=bad)
        except (RunError, UserError) as error:
            log.warning("%s, and nobody gives its weights: %s", others.why, error)
            return None
        if taken is None or validation is None or _good(taken, others, validation):
            return taken
        bad.add(taken.donor)
    return None


def _good(taken: State, others: Others, validation: Validation) -> bool:
    """The weights of a member that says it is further must not be much worse; of the larger part of a swarm it is
    enough that they have learned a bit.
    """
    loss = validation.loss_of(taken.vectors[0])
    limit = LEARNED_RATIO * validation.chance if others.ids else WORSE_RATIO * validation.own_loss()
    if loss >= limit:
        log.warning("%s, but these weights are no good: %s", others.why, fields(val_loss=loss, limit=limit))
    return loss < limit


def _begin(state: OuterState, presence: Presence, *, alone: bool = False) -> None:
    presence.origin.note(alone=alone, round=state.counters.round, root=state.counters.root)
