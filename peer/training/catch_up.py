"""Takes the state of a member: at the start, or later when this peer's weights cannot be averaged with the swarm's."""

from __future__ import annotations

from secrets import token_hex

from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.rounds.state import ROOT_BYTES, State
from peer.rounds.types import Grouping
from peer.swarm.healing import STALE_ROUNDS, Replacement
from peer.swarm.presence import Presence
from peer.telemetry.metrics import ActivityTimer
from peer.training.outer_state import OuterState
from peer.training.validation import WORSE, Validation

log = get_logger("joining")
LEARNED_RATIO = 0.98  # of the loss of a uniform guess: noise may be a little better
DOUBTED = "they say a round that this peer cannot check; to take it, start this peer again: %s"
DONORS = 3  # asked one after the other until one gives good weights


def catch_up(
    state: OuterState,
    presence: Presence,
    timeout: float,
    *,
    same_seed: bool = True,
    restored: bool = True,
    reached: int = 0,
    latest: int | None = None,
) -> None:
    """Take the state of a member in a later round, if there is one. A newcomer adopts it; a peer that has trained keeps
    its own change. A method without exchange takes nothing: it is the control of those that exchange.

    ``same_seed``: fresh weights are the same at all peers; if not, a newcomer takes a member's even before the first
    round is complete.
    ``restored``: this state is that of a checkpoint, since which others may have got what rounding had kept back.
    ``reached``: the last round of this peer before its restart; its checkpoint may be older.
    ``latest``: the latest round of the members with which this peer begins; they may be further when it asks them.
    """
    round = state.counters.round
    if state.inner.step:
        recent = reached - round <= STALE_ROUNDS and not state.outer.equal_replicas
        above = round + (STALE_ROUNDS if recent else 0)
    else:
        above = round if same_seed else round - 1
    taken = None
    if state.outer.grouping is not Grouping.NOBODY and (latest is None or latest > above):
        taken = presence.take_state(state.room(), timeout, above=above, reached=reached)
    if taken is not None and taken.round > above:
        (state.rebase if state.inner.step else state.adopt)(taken)
        if restored:
            state.drop_kept()
    state.counters.root = state.counters.root or token_hex(ROOT_BYTES)
    alone = taken is None and not presence.others()
    _note(state, presence, alone=alone, taken=taken is not None)


def _note(state: OuterState, presence: Presence, *, alone: bool, taken: bool) -> None:
    own = state.counters
    presence.origin.note(alone=alone, taken=taken, round=own.round, step=own.boundary_step, root=own.root)


def join_late(
    state: OuterState, presence: Presence, timer: ActivityTimer, validation: Validation | None = None
) -> bool:
    """At a boundary: take the :class:`Replacement` of this peer's weights, if it needs one; with ``validation`` only
    one that is good enough. Returns whether it did.
    """
    state.counters.root = presence.origin.root  # a partner may have changed it
    own = state.counters.round
    needed = presence.replacement()
    if needed is None:
        return False
    with timer("join"):
        presence.call_off("takes the weights of others")
        taken = _ask(needed, state, presence, validation)
        if taken is not None:
            believed = needed.bounds.nearest(taken)
            (state.adopt if needed.adopt else state.rebase)(believed)
            _note(state, presence, alone=False, taken=True)
            log.warning("%s: took its weights: %s", needed.why, fields(own_round=own, round=believed.round))
            if (taken.round, taken.step) > (believed.round, believed.step):
                log.warning(DOUBTED, fields(said=taken.round, round=believed.round))
        presence.note_replacement(needed.ids, taken=taken is not None)
    return taken is not None


def _ask(needed: Replacement, state: OuterState, presence: Presence, validation: Validation | None) -> State | None:
    bad: set[str] = set()
    room = state.room()  # one for all donors: it is as large as two models
    while len(bad) < DONORS:
        try:  # a donor may be hostile: ask it once, and continue to train
            taken = presence.take_state(room, 0.0, above=needed.above, among=needed.ids, without=bad)
        except (RunError, UserError) as error:
            log.warning("%s, and no member gives its weights: %s", needed.why, error)
            break
        if taken is None:
            break
        if validation is None or _good(taken, needed, validation):
            return taken
        bad.add(taken.donor)
    if bad and not needed.ids:
        presence.origin.others_are_no_better()
    return None


def _good(taken: State, needed: Replacement, validation: Validation) -> bool:
    """A member in a later round must have a lower loss on these batches than this peer. The loss of a majority may be
    a little higher, but not as high as that of a guess: its ids may all be of one attacker.
    """
    loss, limit = validation.loss_of(taken.vectors[0]), validation.own_loss()
    if needed.ids:
        limit = min(LEARNED_RATIO * validation.chance, WORSE * limit)
    if loss >= limit:
        log.warning("%s, but the loss of these weights is too high: %s", needed.why, fields(val_loss=loss, limit=limit))
    return loss < limit
