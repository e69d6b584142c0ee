"""A peer joins the network before it loads a model or data: a wrong address costs seconds and no download."""

from __future__ import annotations

import random
from collections.abc import Sequence

from peer.config.digest import canonical, difference, digest_of
from peer.config.schema import SwarmRunConfig
from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.p2p.deadline import together
from peer.p2p.greeting import MemberNode
from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.stream import MESSAGE_TIMEOUT, Refused
from peer.swarm.directory.duplicate_identity import require_alone
from peer.swarm.directory.reader import Reader
from peer.swarm.directory.records import MemberRecord
from peer.swarm.state_transfer.donor import STATE_PROTOCOL

log = get_logger("connect")

MOST_GREETED = 3  # configurations, and members of each
GREETINGS_TIMEOUT = 2 * (OPEN_TIMEOUT + MESSAGE_TIMEOUT)  # seconds for all of them
UNKNOWN = ("model.digest",)  # of the model's files, which are not there yet


def connect(node: MemberNode, run: SwarmRunConfig) -> None:
    """Join the DHT through an initial peer that admits this peer, as the only one with its identity, in a swarm of this
    version and, as far as it is known, this configuration. Raises :class:`UserError` when one of these is not so, and
    :class:`RunError` when it is the version: others may be updated later.

    ``node``: without a configuration to greet with, so that each member answers what its own is.
    """
    node.start()
    require_alone(node, run.name)
    try:
        misfit = _misfit(node, run, Reader(node, run.name).refresh_all())
    except (RunError, TimeoutError) as error:  # later it is asked again, for longer
        log.debug("no member was asked: %s", error)
        return
    if misfit is not None:
        raise misfit


def _misfit(node: MemberNode, run: SwarmRunConfig, present: Sequence[MemberRecord]) -> UserError | RunError | None:
    """Why this peer can train with nobody. Some members of each configuration are asked: any of them may lie, but one
    that has sent the configuration of its record has proved what it is. Who only refuses may fit when it is updated,
    and proves nothing: the error names both.
    """
    each: dict[str, list[MemberRecord]] = {}
    for record in random.sample(present, len(present)):
        each.setdefault(record.config, []).append(record)
    if not each or len(each) > MOST_GREETED:
        return None
    asked = [record for members in each.values() for record in members[:MOST_GREETED]]

    async def ask() -> list[Refused | None]:
        return await together(node.refused_by(it.peer_id, STATE_PROTOCOL, it.addresses) for it in asked)

    found: dict[str, UserError | RunError | None] = {}  # by configuration; ``None`` for one that fits
    for record, refused in zip(asked, node.call(ask(), GREETINGS_TIMEOUT), strict=True):
        if refused is None:
            continue
        if refused.run is None:
            found.setdefault(record.config, RunError(f"peer {record.name} refuses this one: {refused}"))
        elif digest_of(refused.run) == record.config:
            found[record.config] = _unlike(run, record, refused.run)
    errors = [it for it in found.values() if it is not None]
    if len(errors) < len(each):
        return None
    errors.sort(key=lambda it: isinstance(it, RunError))
    first, last = errors[0], errors[-1]
    return first if type(first) is type(last) else RunError(f"{first}; {last}")


def _unlike(run: SwarmRunConfig, record: MemberRecord, theirs: str) -> UserError | None:
    """What this configuration has otherwise than the member's; ``None`` when they are equal, as far as is known."""
    found = difference(canonical(run), theirs, UNKNOWN)
    what = f"this configuration is not the swarm's: {found} (at peer {record.name})"
    return UserError(f"{what}; use the swarm's, or give this run another run.name") if found else None
