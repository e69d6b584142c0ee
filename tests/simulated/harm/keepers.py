"""Nodes of an attacker that has made ids until they were the nearest to a key: they keep nothing, and answer."""

from __future__ import annotations

import contextvars
from typing import Any

from hivemind.dht.routing import DHTID

from peer.p2p.dht.search import COPIES, id_of
from tests.simulated.loop import PROCESS, Process
from tests.simulated.p2p.dht import SimulatedDHT, Value, _place
from tests.simulated.p2p.network import Host, new_id
from tests.simulated.world import World


class EmptyKeeper(SimulatedDHT):
    """It names the others of ``gang`` only."""

    gang: list[EmptyKeeper]

    def _keep(self, key: DHTID, subkey: str, value: Value, now: float) -> None:
        """It answers that it has stored the record."""

    def _found(self, key: DHTID, known: Any, nothing: bool, asker: DHTID) -> tuple[Value | None, Any]:
        return None, {it.node_id: it.peer_id for it in self.gang}


def surround(world: World, key: str, at: float, latency: float = 0.01) -> int:
    """From ``at`` on the nodes that are nearest to ``key`` keep nothing. Returns how many ids were made for it."""
    hosts = [world.bootstrap, *(peer.host for peer in world.peers)]
    nearest, gang, tries = min(id_of(key) ^ _place(it.peer_id) for it in hosts), list[EmptyKeeper](), 0
    while len(gang) < COPIES:
        peer_id, tries = new_id(world.chance), tries + 1
        if id_of(key) ^ _place(peer_id) < nearest:
            host = Host(peer_id, f"/ip4/46.0.0.{tries % 250}/tcp/4000", latency, 1e7, 1e7, process=Process("keeper"))
            world.network.hosts[peer_id] = host
            gang.append(EmptyKeeper(world.network, host, world.nodes))
    for keeper in gang:
        keeper.gang = gang
        context = contextvars.Context()
        context.run(PROCESS.set, keeper.host.process)
        world.loop.call_later(at, _join, world, keeper, context=context)
    return tries


def _join(world: World, keeper: EmptyKeeper) -> None:
    world.loop.create_task(keeper.join([world.bootstrap.peer_id]))
