"""A member's node on the simulated network: the product's, with other floors below it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from peer.p2p.addresses import owner_of
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.admission.gate import ADMISSION_PROTOCOL
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import Handler, NodeSettings
from peer.p2p.reachability.decide import Reachability
from tests.simulated.dht import SimulatedDHT
from tests.simulated.loop import PROCESS, Process
from tests.simulated.network import Host, Network, SimulatedP2P


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
        self.served: dict[str, Any] = {}  # handlers by protocol

    def listen(self, reach: Reachability, port: int | None = None) -> None:
        self._p2p = SimulatedP2P(self.network, self.host)  # type: ignore[assignment]
        self.host.process = self._process
        self.peer_id = self.host.peer_id
        self.call(self._listen(), 5.0)

    async def _listen(self) -> None:
        self._listening = await self.visible()
        if self._gate is not None:
            await self.serve(ADMISSION_PROTOCOL, self._gate.answer, open_to_all=True)

    async def serve_members(self, protocol: str, handler: Handler) -> None:
        self.served[protocol] = handler
        await super().serve_members(protocol, handler)

    async def join(self, reached: Sequence[str], *, client: bool) -> None:
        admission = self._authority.admission if self._authority is not None else None
        dht = SimulatedDHT(self.network, self.host, self._everyone, admission)
        await dht.join([owner_of(address) for address in reached])
        self._dht = dht  # type: ignore[assignment]

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


def factory(network: Network, host: Host, everyone: dict[str, SimulatedDHT]) -> Callable[..., SimulatedNode]:
    """What stands in for ``MemberNode`` in one process."""

    def make(settings: NodeSettings, authority: Authority | None, member: MemberIdentity) -> SimulatedNode:
        return SimulatedNode(settings, authority, member, network=network, host=host, everyone=everyone)

    return make
