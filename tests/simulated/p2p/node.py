"""A member's node on the simulated network: the product's, with other floors below it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from peer.p2p.addresses import owner_of, tcp_place
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.admission.gate import ADMISSION_PROTOCOL
from peer.p2p.budgets import RESERVATION_STREAMS
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import Handler
from peer.p2p.reachability.decide import Reachability
from peer.p2p.reachability.dialback import DIALBACK_PROTOCOL, DialBack
from peer.p2p.reachability.relay import RELAY_PROTOCOL
from peer.p2p.settings import NodeSettings
from tests.simulated.harm import bad_relays
from tests.simulated.loop import PROCESS, Process
from tests.simulated.p2p.dht import SimulatedDHT
from tests.simulated.p2p.network import Host, Network, SimulatedP2P


class SimulatedNode(MemberNode):
    """Its daemon is a host of ``network``."""

    def __init__(
        self,
        settings: NodeSettings,
        authority: Authority | None,
        member: MemberIdentity,
        *,
        network: Network,
        host: Host,
        everyone: dict[str, SimulatedDHT],
    ) -> None:
        super().__init__(replace(settings, bulk_port="off"), authority, member)  # no sockets, no threads
        self.network, self.host, self._everyone = network, host, everyone
        process = PROCESS.get()
        assert process is not None
        self._process: Process = process
        self.bad_relay = ""  # what it does as a relay (harm/bad_relays.py); empty for an honest one
        self.served: dict[str, Any] = {}  # handlers by protocol

    def listen(self, reach: Reachability, port: int | None = None) -> None:
        self._p2p = SimulatedP2P(self.network, self.host)  # type: ignore[assignment]
        self.host.process = self._process
        self.call(self._listen(), 5.0)

    async def _listen(self) -> None:
        await self.own.hear(self.host.peer_id)
        if self.host.nat:
            self.network.circuits.accept(self.host)
        if self._gate is not None:
            await self.serve(ADMISSION_PROTOCOL, self._gate.answer, open_to_all=True)

    async def serve(self, protocol: str, handler: Handler, **limits: Any) -> None:
        self.served.setdefault(protocol, handler)
        await super().serve(protocol, handler, **limits)

    async def serve_members(self, protocol: str, handler: Handler) -> None:
        self.served[protocol] = handler
        await super().serve_members(protocol, handler)

    @property
    def reservations(self) -> set[str]:
        """Ids of the peers behind a NAT for which it is a relay that joins others to them."""
        if self.bad_relay or RELAY_PROTOCOL not in self.served:
            return set()
        return set(self.served[RELAY_PROTOCOL].__self__._slots)

    async def join(self, reached: Sequence[str], *, client: bool) -> None:
        admission = self._authority.admission if self._authority is not None else None
        dht = SimulatedDHT(self.network, self.host, self._everyone, admission, client)
        await dht.join([owner_of(address) for address in reached])
        self._dht = dht  # type: ignore[assignment]

    async def _offer(self, reach: Reachability) -> None:
        await super()._offer(reach)
        await self.serve(DIALBACK_PROTOCOL, DialBack(self._who_answers).answer)
        if self.bad_relay and not reach.relayed:
            await self.serve(RELAY_PROTOCOL, partial(bad_relays.hold, self.bad_relay), limit=RESERVATION_STREAMS)

    async def _who_answers(self, host: str, port: int, timeout: float) -> str:
        """As the product's probe: over a new connection."""
        address = tcp_place(host, port)
        other = next(it for it in self.network.hosts.values() if it.address == address)
        async with asyncio.timeout(timeout):
            await asyncio.sleep(4 * self.network.delay(self.host, other))
            await self.network.way(self.host, other)
            await asyncio.sleep(2 * timeout if other.nat else 0.0)
            if not other.alive:
                raise OSError("connection refused")
            return other.peer_id

    def close(self, goodbye: Coroutine[Any, Any, None] | None = None) -> None:
        """As :meth:`LoopThread.close`, for this process' tasks only: the loop is everybody's."""
        if self._process.dead:
            if goodbye is not None:
                goodbye.close()
            return
        if goodbye is not None:
            self.call(goodbye, 10.0)
        for task in list(self._process.tasks):
            task.cancel()

    def kill(self) -> None:
        self.network.drop_all(self.host)
