"""The settings that a program's own loop takes from the swarm it joins, where the program does not say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peer.api.config import OwnMember, OwnRun
from peer.config.received import received
from peer.errors import RunError, one_line
from peer.logs import get_logger
from peer.swarm.configuration import NoMajority, offered

log = get_logger("outer_loop")

OF_THE_PROGRAM = ("tag",)  # only the program can say what else must be equal


def of_swarm(own: OwnMember, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``run`` that most members have; ``given``: the program's. None when nobody is there or tells them: then
    swarm/connect.py compares the program's own with those of members.

    Raises :class:`peer.errors.UserError` for a swarm that no program can join, and for several runs without a name.
    """
    try:
        offer = offered(own, given.get("name"))
    except (NoMajority, RunError, TimeoutError) as error:
        log.warning("this program's own settings count: %s", one_line(error))
        return {}
    if offer is None:
        return {}
    tree = received(offer.text, OwnRun).tree
    outer = given.get("outer")
    if isinstance(outer, dict) and outer.get("name", tree["outer"]["name"]) != tree["outer"]["name"]:
        return {"name": offer.name}  # its settings are for another method, and connect.py says that they differ
    return {key: value for key, value in tree.items() if key not in OF_THE_PROGRAM}
