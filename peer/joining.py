"""How a peer's state becomes a member's: when it starts, or later if nobody was to be seen then.

Previous stations: outer_state.py and swarm/presence.py. Next stations: membership.py, training.py.
"""

from __future__ import annotations

from secrets import token_hex

from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.metrics import PhaseClock
from peer.outer_state import OuterState
from peer.swarm.latecomer import STALE_ROUNDS
from peer.swarm.presence import Presence

log = get_logger("joining")

ROOT_BYTES = 8


def catch_up(
    state: OuterState, presence: Presence, timeout: float, *, newcomer_above: int = 0, reached: int = 0
) -> None:
    """Become as a member that is further, if there is one: a newcomer, or who resumes from before its last merges.

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


def join_late(state: OuterState, presence: Presence, phase: PhaseClock, timeout: float) -> None:
    """At a boundary: the same for a peer that began alone and now sees others that are further (latecomer.py)."""
    state.counters.root = presence.beginning.root  # that of whom we met, perhaps: for our checkpoints and newcomers
    if not presence.late:
        return
    own = state.counters.round
    anew = not presence.beginning.since
    with phase("join"):
        try:
            taken = presence.join(state.room(), timeout, above=own + STALE_ROUNDS)
        except (RunError, UserError) as error:
            log.warning("others are further and none gives its weights: %s", error)
            return
        if taken is not None:
            (state.adopt if anew else state.catch_up)(taken)
            _begin(state, presence)
            log.warning("the swarm was there before: took its weights: %s", fields(own_round=own, round=taken.round))


def _begin(state: OuterState, presence: Presence, *, alone: bool = False) -> None:
    presence.beginning.note(alone=alone, round=state.counters.round, root=state.counters.root)
