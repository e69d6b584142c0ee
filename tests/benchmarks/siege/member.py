"""A member of the run that has joined like every other one, and then attacks.

python -m tests.benchmarks.siege.member train ...        in the environment ATTACK=<one of attacks.py with "member">

Its lies are those of tests/simulated/harm/lies.py where they have the name; the others are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from peer.commands.cli import main
from peer.p2p import identity
from peer.p2p.greeting import MemberNode
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import BadMessage, StreamLost
from peer.rounds.types import Group, Seat
from peer.swarm.grouping.known_members import GATHER_PROTOCOL
from peer.swarm.grouping.messages import JOIN_ANSWER, Admitted, JoinGroup
from peer.swarm.state_transfer.donor import STATE_ANSWER, STATE_PROTOCOL, StateHeader, StateRequest
from peer.training.trainer import Trainer
from tests.simulated.harm import lies
from tests.swarm.support.attacks import Hostile, gradient, uphill

TOKENS = 2**53
LENGTH = 20.0  # of the change, along the gradient
IDS = 8  # of a crowd
STREAMS = 4  # at once, to each donor
SECONDS = 5.0  # for one message
FOREVER = 1e6  # seconds
Target = Callable[[MemberNode, Seat], Coroutine[Any, Any, None]]
honest = Trainer.run


def attacking(trainer: Trainer) -> None:
    """In the place of :meth:`Trainer.run`."""
    name, node = os.environ["ATTACK"], trainer.member.node
    boundary: Any = trainer.boundary
    if name in INSTEAD:
        crowd = [node, *(_another(trainer, number) for number in range(IDS - 1))] if name == "crowd" else [node]
        node.call(_attack(INSTEAD[name], trainer, crowd), FOREVER)
    lies.in_state(name, trainer.state)
    lies.in_exchange(name, trainer)
    if name == "uphill":
        boundary.exchange.codec = Hostile(uphill(lambda: gradient(trainer.state), LENGTH))
    if name == "tokens":
        swap = boundary.exchange.average
        boundary.exchange.average = lambda own, group: swap(own, _boasting(group))
    print("attacks", flush=True)
    honest(trainer)


def _boasting(group: Group) -> Group:
    return replace(group, tokens=TOKENS)


async def _attack(attack: Target, trainer: Trainer, nodes: list[MemberNode]) -> None:
    """Every node attacks every member that it knows, for ever."""
    await asyncio.sleep(2.0)  # until the directory was read
    records = trainer.member.presence.others()
    seats = [Seat(it.peer_id, it.name, tuple(it.addresses)) for it in records]
    print(f"attacks {len(seats)} members by {len(nodes)} ids", flush=True)
    each = product(nodes, seats, range(STREAMS if attack is donors else 1))
    await asyncio.gather(*(_for_ever(attack, node, seat) for node, seat, _ in each))


async def _for_ever(attack: Target, node: MemberNode, seat: Seat) -> None:
    while True:
        with contextlib.suppress(StreamLost, BadMessage, TimeoutError, OSError):
            await attack(node, seat)
        await asyncio.sleep(0.1)


async def donors(node: MemberNode, seat: Seat) -> None:
    """Threat 20: takes the weights of everybody, by several streams at once, and never says that they came."""
    stream = await node.open_to_member(seat.peer_id, STATE_PROTOCOL, seat.addresses)
    try:
        await stream.send(StateRequest(), SECONDS)
        if isinstance(await stream.receive(STATE_ANSWER, SECONDS), StateHeader):
            await stream.until_closed(60.0)
    finally:
        stream.close()


async def attend(node: MemberNode, seat: Seat) -> None:
    """Threats 6 and 14: joins the group of everybody and never comes to the boundary."""
    stream = await node.open_to_member(seat.peer_id, GATHER_PROTOCOL, seat.addresses)
    try:
        here = ("/ip4/203.0.113.7/tcp/31337/" + "x" * 100,) * 8  # as long as a seat may be
        await stream.send(JoinGroup(seat=Seat(node.peer_id, "n" * 64, here), round=0, eta=0.0), SECONDS)
        if isinstance(await stream.receive(JOIN_ANSWER, SECONDS), Admitted):
            await stream.until_closed(600.0)
    finally:
        stream.close()


def _another(trainer: Trainer, number: int) -> MemberNode:
    """A node of the same run with an id of its own."""
    key = Path(trainer.config.run.dir) / f"crowd{number}.key"
    identity.load_or_create(key)
    known = trainer.config.peer.initial_peers
    node = MemberNode(NodeSettings(key, "127.0.0.1", 0, initial_peers=known), None, trainer.member.node.member)
    node.start()
    return node


INSTEAD: dict[str, Target] = {"donors": donors, "absent": attend, "crowd": attend}

if __name__ == "__main__":
    Trainer.run = attacking  # type: ignore[method-assign]
    main()
