"""Where others reach this node: what its record says, for as long as it runs.

A provider gives another address, a machine moves to another network: a node that could be dialled looks again from time
to time. It asks one other node as whom that sees it, and decide.py has the whole answer when that has changed. A node
that nobody can dial needs no look: its reservations follow it. But what only members say is asked again and again, and
only members with which a swap has succeeded are asked: anybody can write records.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from peer.errors import one_line
from peer.logs import get_logger
from peer.p2p.addresses import is_loopback, is_of_private_network, owner_of, place_of, tcp_of
from peer.p2p.reachability.decide import ASKED, Reachability, Visible, decide, seen_as
from peer.p2p.reachability.reservations import RELAYS, Reservations
from peer.p2p.stream import Open
from peer.rounds.backoff import Proven

log = get_logger("reach")

ADDRESS_LOOK_SECONDS = 120.0  # between two looks
LOOK_AGAIN_SECONDS = 60.0  # the same while nobody could tell, or only members say so
RESERVATION_TIMEOUT = 10.0  # seconds to wait for a reservation at a relay, before going on without


class OwnAddresses:
    """Belongs to the network thread. ``initial_peers``: addresses with ids. ``proven``: who is asked beside them."""

    def __init__(
        self,
        open_stream: Open,
        visible: Visible,
        initial_peers: Sequence[str],
        background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        proven: Proven,
    ) -> None:
        self._open, self._visible, self._background = open_stream, visible, background
        self._initial_peers, self._proven = initial_peers, proven
        self.members: Callable[[], Sequence[str]] = tuple  # addresses of members that can be dialled, no initial peers
        self.peer_id = ""
        self.reach = Reachability()
        self.listening: tuple[str, ...] = ()
        self._heard: frozenset[str] = frozenset()  # of the daemon, when ``listening`` was set
        self._reservations = Reservations(open_stream, initial_peers, self._relays)

    @property
    def all(self) -> tuple[str, ...]:
        """Multiaddrs with this node's id.

        The first one is through a relay when others cannot dial the node, the second one when those of its network can.
        """
        if not self._uses_relays:
            return self.listening
        own = [address for address in self.listening if not is_loopback(address)]
        direct = own[: int(self.reach.local)]
        relayed = (f"{place}/p2p/{self.peer_id}" for place in self._reservations.places)
        return (*direct, *relayed, *own[len(direct) :]) or self.listening

    def called(self, origin: str) -> None:
        """Somebody has opened a stream to this node from this multiaddr."""
        self._reservations.called(origin)

    async def hear(self, peer_id: str) -> None:
        """Take what the daemon says of itself, which has begun with this id."""
        self.peer_id, self.listening = peer_id, tuple(await self._visible())
        self._heard = frozenset(self.listening)

    async def use(self, reach: Reachability) -> None:
        """From now on others reach this node in this way."""
        await self.hear(self.peer_id)  # first: when the daemon does not answer, the next look tries again
        self.reach = reach
        if reach.announce:
            self.listening = tuple(f"{place_of(it)}/p2p/{self.peer_id}" for it in reach.announce)
        if self._uses_relays:
            self._reservations.start(self._background, RELAYS if reach.relayed else 1)
            if reach.relayed and not await self._reservations.first(RESERVATION_TIMEOUT):
                log.warning("no relay has granted a reservation yet: others cannot call this peer, it can call them")
        else:
            self._reservations.stop()

    async def watch(self, decides: bool, hidden: Callable[[bool], None]) -> None:
        """Follow a change, until nobody can dial this node and an initial peer has said so.

        ``decides``: ask others, and do not only follow the daemon. ``hidden``: told when that changes.
        """
        while self.reach.by_members or not self.reach.relayed:
            pause = LOOK_AGAIN_SECONDS if self._doubtful else ADDRESS_LOOK_SECONDS
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            try:
                if decides:
                    await self._look(hidden)
                elif not self.reach.announce:
                    await self.hear(self.peer_id)
            except (OSError, TimeoutError) as error:
                log.debug("this node's addresses are not known: %s", one_line(error))

    async def _look(self, hidden: Callable[[bool], None]) -> None:
        if not (self._doubtful or await self._moved()):
            return
        asked, otherwise = (random.sample(it, min(ASKED, len(it))) for it in (self._initial_peers, self._witnesses()))
        found = await decide(self._open, self._visible, asked, otherwise=otherwise)
        if found.unknown:
            if not self.reach.announce:
                await self.hear(self.peer_id)
            return
        before, relayed = self.all, self.reach.relayed
        await self.use(found)
        if found.relayed != relayed:
            hidden(found.relayed)
        if self.all != before:
            log.info("others reach this peer at: %s", self.all[0])

    async def _moved(self) -> bool:
        """Has the daemon another address, or does somebody see this node under another one?"""
        if frozenset(await self._visible()) != self._heard:
            return True
        asked = list(self._initial_peers)
        if not self.reach.local:  # of members, those that see what the internet sees
            asked += [it for it in self._witnesses() if not is_of_private_network(it)]
        observed = await seen_as(self._open, random.choice(asked))
        return bool(observed) and observed not in {found[0] for found in map(tcp_of, self.listening) if found}

    def _witnesses(self) -> list[str]:
        """Addresses of members whose word may count."""
        return [it for it in self.members() if owner_of(it) in self._proven]

    @property
    def _doubtful(self) -> bool:
        return self.reach.unknown or self.reach.by_members

    @property
    def _uses_relays(self) -> bool:
        return self.reach.relayed or self.reach.local

    def _relays(self) -> Sequence[str]:
        """Members to ask for a reservation: those of other networks call who is dialled by a private address."""
        return [it for it in self.members() if self.reach.relayed or not is_of_private_network(it)]
