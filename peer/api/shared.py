"""The settings that a program's own loop takes from the swarm it joins, where the program does not say them.

Where nobody tells them, a program that resumes takes those of its saved state: who had them may have left for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peer.api.config import OwnMember, OwnRun
from peer.config.received import received
from peer.errors import RunError, UserError, one_line
from peer.logs import get_logger
from peer.swarm.configuration import NoMajority, offered

log = get_logger("outer_loop")

OF_THE_PROGRAM = ("tag",)  # only the program can say what else must be equal


def of_swarm(own: OwnMember, given: Mapping[str, Any], state: Any = None) -> dict[str, Any]:
    """Keys of ``run`` that most members have, or the saved ``state``; ``given``: the program's. Without both none: then
    swarm/connect.py compares the program's own with those of members.

    Raises :class:`peer.errors.UserError` for a swarm that no program can join, and for several runs without a name.
    """
    name = given.get("name")
    saved = _of_state(state, name)
    tree = _of_members(own, name or saved.get("name"))
    if not tree and saved:
        log.info("the settings of the saved state count")
    tree = tree or saved
    outer = given.get("outer")
    if tree and isinstance(outer, dict) and outer.get("name", tree["outer"]["name"]) != tree["outer"]["name"]:
        return {"name": tree["name"]}  # the others are for another method, and connect.py says that they differ
    return {key: value for key, value in tree.items() if key not in OF_THE_PROGRAM}


def _of_members(own: OwnMember, name: str | None) -> dict[str, Any]:
    if not own.initial_peers:
        return {}
    try:
        offer = offered(own, name)
    except (NoMajority, RunError, TimeoutError) as error:
        log.warning("the swarm tells no settings: %s", one_line(error))
        return {}
    return {} if offer is None else received(offer.text, OwnRun).tree


def _of_state(state: Any, name: str | None) -> dict[str, Any]:
    """None of what is no state, which state.py refuses, or of a run with another name than the program's."""
    text = state.get("config") if isinstance(state, Mapping) else None
    try:
        tree = received(text, OwnRun).tree if isinstance(text, str) else {}
    except UserError:
        return {}
    return tree if name in (None, tree.get("name")) else {}
