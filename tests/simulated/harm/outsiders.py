"""An outsider: no member, but it knows everybody's address. It opens streams and sends what no member would."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from peer.p2p.admission.gate import Pass
from peer.p2p.dial import parsed_id
from peer.p2p.stream import MESSAGE_CAP, Message
from peer.swarm.pairing.agreement import Propose
from peer.swarm.pairing.proposals import MEET_PROTOCOL
from tests.simulated.p2p.admission import Invitations
from tests.simulated.p2p.network import NOBODY, Host, Network, SimulatedP2P
from tests.simulated.peer import SimulatedPeer

PAUSE = (0.05, 2.0)  # seconds between two streams
HELD = (0.0, 40.0)  # seconds for which it keeps one


def framed(body: bytes) -> bytes:
    """A message of the product."""
    return len(body).to_bytes(4, "big") + body


def rubbish(chance: random.Random) -> bytes:
    """Random bytes, a length that nobody should believe, half a message, or JSON of no message."""
    return chance.choice(
        (
            chance.randbytes(chance.randint(1, 2000)),
            (2**32 - 1).to_bytes(4, "big") + chance.randbytes(100),
            MESSAGE_CAP.to_bytes(4, "big") + b"{" * chance.randint(1, 1000),
            framed(b"[" * 2000),
            framed(b'{"kind": "propose", "name": {}, "round": -1, "eta": 1e999}'),
            b"",
        )
    )


class Outsider:
    """``host``: its machine."""

    def __init__(self, network: Network, host: Host, peers: list[SimulatedPeer], chance: random.Random) -> None:
        self._network, self._host, self._peers, self._chance = network, host, peers, chance
        self._p2p = SimulatedP2P(network, host)
        self._forged = Invitations(-1).authority(host.peer_id).admission.own  # signed by itself, whatever the seed

    async def trouble(self, seconds: float) -> None:
        """For so long."""
        until = self._network.loop.time() + seconds
        while self._network.loop.time() < until:
            await asyncio.sleep(self._chance.uniform(*PAUSE))
            victim = self._chance.choice(self._peers)
            protocols = sorted(victim.host.handlers)
            if protocols:
                await self._knock(victim, self._chance.choice(protocols))

    async def _knock(self, victim: SimulatedPeer, protocol: str) -> None:
        self._host.book.add(victim.host.peer_id)
        try:
            async with asyncio.timeout(5.0):
                to = parsed_id(victim.host.peer_id)
                _, _, writer = await self._p2p.call_binary_stream_handler(to, protocol)
        except (OSError, TimeoutError):
            return
        for data in self._words(victim, protocol):
            writer.write(data)
        self._network.loop.call_later(self._chance.uniform(*HELD), writer.close, context=NOBODY)

    def _words(self, victim: SimulatedPeer, protocol: str) -> list[bytes]:
        """As far as it gets: a pass, a member's greeting, which is no secret, and then rubbish or a proposal."""
        invited, trainer = victim.config.run.admission == "invite", victim.trainer
        said: list[Message] = [Pass(certificate=self._forged)] if invited else []
        if trainer is not None and self._chance.random() < 0.7:
            said.append(trainer.member.node.member.greeting)
            if invited and protocol == MEET_PROTOCOL and self._chance.random() < 0.7:
                context: Any = trainer.boundary.context
                said.append(self._proposal(trainer.counters.round, context.progress.phase_seconds or 1.0))
        return [framed(it.model_dump_json().encode()) for it in said] + [rubbish(self._chance)]

    def _proposal(self, round: int, phase_seconds: float) -> Propose:
        """A good one: only its author is wrong."""
        return Propose(name="outsider", round=round, eta=self._chance.uniform(0, phase_seconds), phase=phase_seconds)
