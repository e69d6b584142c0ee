"""What a node says of its own addresses, where others dial it and after it has moved."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from peer.p2p.reachability import own_addresses
from peer.p2p.reachability.decide import Reachability
from peer.p2p.reachability.own_addresses import LOOK_AGAIN_SECONDS, OwnAddresses
from peer.rounds.backoff import Proven

ME, HOME, PUBLIC = "QmMe", "/ip4/192.168.1.2/tcp/4001", "/ip4/45.0.0.9/tcp/4001"
GUEST, NEIGHBOUR = "/ip4/45.0.0.3/tcp/1/p2p/QmGuest", "/ip4/192.168.1.3/tcp/1/p2p/QmNeighbour"
INITIAL = "/ip4/45.0.0.1/tcp/1/p2p/QmFirst"
UNPROVEN = "/ip4/45.0.0.4/tcp/1/p2p/QmUnproven"


class Place:
    """Of a node: what its daemon says, as whom others see it, and what they decide."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *visible: str, seen: str = "45.0.0.9") -> None:
        self.visible, self.seen, self.found = visible, seen, Reachability()
        self.asked: list[str] = []
        self.otherwise: list[str] = []  # who is asked when no initial peer answers
        self.decided = 0
        monkeypatch.setattr(own_addresses, "seen_as", self._seen_as)
        monkeypatch.setattr(own_addresses, "decide", self._decide)
        monkeypatch.setattr(own_addresses, "RESERVATION_TIMEOUT", 0.01)
        self.proven = Proven()
        self.proven.add("QmGuest")
        self.proven.add("QmNeighbour")
        self.own = OwnAddresses(self._open, self._visible, [INITIAL], self._background, self.proven)
        self.own.members = lambda: [GUEST, NEIGHBOUR, UNPROVEN]
        self.tasks: list[asyncio.Task[None]] = []

    async def look(self, reach: Reachability) -> bool:
        """One look at a node that stood so; did it begin to use relays?"""
        hidden: list[bool] = []
        await self.own.hear(ME)
        await self.own.use(reach)
        await self.moves()
        await self.own._look(hidden.append)
        for task in self.tasks:
            task.cancel()
        assert hidden in ([], [True])
        return bool(hidden)

    async def moves(self) -> None:
        """Between the start and the look."""

    async def _open(self, *_: Any) -> Any:
        await asyncio.sleep(60)
        raise TimeoutError

    async def _visible(self) -> list[str]:
        return [f"{it}/p2p/{ME}" for it in self.visible]

    async def _seen_as(self, _: Any, address: str) -> str:
        self.asked.append(address)
        return self.seen

    async def _decide(self, *_: Any, otherwise: list[str]) -> Reachability:
        self.decided += 1
        self.otherwise = otherwise
        return self.found

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]


def test_an_address_that_stays_is_looked_at_by_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, PUBLIC)
    asyncio.run(place.look(Reachability()))
    assert place.decided == 0 and len(place.asked) == 1 and place.own.all == (f"{PUBLIC}/p2p/{ME}",)


def test_a_daemon_with_another_address_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moved(Place):
        async def moves(self) -> None:
            self.visible = ("/ip4/45.0.0.77/tcp/4001",)

    place = Moved(monkeypatch, PUBLIC)
    asyncio.run(place.look(Reachability()))
    assert place.decided == 1 and not place.asked and place.own.all == (f"/ip4/45.0.0.77/tcp/4001/p2p/{ME}",)


@pytest.mark.real_time
async def test_a_daemon_that_does_not_answer_is_asked_again_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node was taken for one that uses relays: it looked no more, and asked no relay."""

    class Busy(Place):
        async def moves(self) -> None:
            self.found, self.seen = Reachability(relayed=True), "45.0.0.77"
            self.busy = True

        async def _visible(self) -> list[str]:
            if self.decided and getattr(self, "busy", False):
                self.busy = False
                raise TimeoutError
            return await super()._visible()

    place = Busy(monkeypatch, PUBLIC)
    hidden: list[bool] = []
    with pytest.raises(TimeoutError):
        await place.look(Reachability())
    assert not place.own.reach.relayed and not place.tasks
    await place.own._look(hidden.append)
    assert place.own.reach.relayed and place.tasks and hidden == [True]
    for task in place.tasks:
        task.cancel()


@pytest.mark.parametrize("announce", [(), (PUBLIC, HOME)])
def test_when_nobody_can_tell_only_the_daemon_is_believed(
    announce: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moved(Place):
        async def moves(self) -> None:
            self.visible, self.found = ("/ip4/45.0.0.77/tcp/4001",), Reachability(unknown=True)

    place = Moved(monkeypatch, PUBLIC)
    asyncio.run(place.look(Reachability(announce=announce)))
    assert place.own.all[0] == f"{announce[0] if announce else '/ip4/45.0.0.77/tcp/4001'}/p2p/{ME}"


def test_who_is_seen_under_another_address_decides_again(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, HOME, seen="45.0.0.44")
    place.found = Reachability(announce=("/ip4/45.0.0.44/tcp/4001", HOME))
    assert not asyncio.run(place.look(Reachability(announce=(PUBLIC, HOME))))
    assert place.own.all == (f"/ip4/45.0.0.44/tcp/4001/p2p/{ME}", f"{HOME}/p2p/{ME}")


def test_who_cannot_be_dialled_any_more_says_so_and_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, HOME, seen="45.0.0.44")
    place.found = Reachability(relayed=True)
    assert asyncio.run(place.look(Reachability(announce=(PUBLIC, HOME))))
    assert len(place.tasks) == own_addresses.RELAYS
    assert asyncio.run(asyncio.wait_for(place.own.watch(True, pytest.fail), 1.0)) is None, "no look is needed any more"


def test_who_is_dialled_by_a_private_address_asks_no_stranger_of_the_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    """He sees the router's address, which is not this node's."""
    for _ in range(20):
        place = Place(monkeypatch, HOME, seen="192.168.1.2")
        asyncio.run(place.look(Reachability(local=True)))
        assert place.asked == [INITIAL] and not place.decided


def test_a_local_node_finds_a_relay_among_members_of_other_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept to its initial peers, and nobody from outside came in any more when they were gone."""
    place = Place(monkeypatch, HOME)
    asyncio.run(place.look(Reachability(local=True)))
    assert place.own._relays() == [GUEST, UNPROVEN]
    place.own.reach = Reachability(relayed=True)
    assert place.own._relays() == [GUEST, NEIGHBOUR, UNPROVEN]


def test_only_members_with_which_a_swap_has_succeeded_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can write records: with fifty of them an attacker was nearly always the one who was asked."""
    asked = set[str]()
    for _ in range(40):
        place = Place(monkeypatch, PUBLIC, seen="45.0.0.44")
        asyncio.run(place.look(Reachability()))
        asked |= {*place.asked}
        assert {*place.otherwise} == {GUEST, NEIGHBOUR}
    assert asked == {INITIAL, GUEST}
    place.proven.discard("QmGuest")
    place.proven.discard("QmNeighbour")
    asyncio.run(place.look(Reachability()))
    assert place.otherwise == []


@pytest.mark.parametrize("lie", [Reachability(relayed=True), Reachability(announce=("/ip4/45.0.0.66/tcp/4001",))])
async def test_what_only_members_say_is_asked_again(lie: Reachability, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had begun to use relays never looked again, was a client of the DHT for good, and kept its reservations."""
    place, hidden = Place(monkeypatch, PUBLIC), list[bool]()
    place.found = replace(lie, by_members=True)
    await place.own.hear(ME)
    await place.own.use(Reachability(unknown=True))
    watching = asyncio.ensure_future(place.own.watch(True, hidden.append))
    for found in place.found, Reachability(unknown=True), place.found:  # it goes on, and nobody can tell meanwhile
        place.found = found
        await asyncio.sleep(1.5 * LOOK_AGAIN_SECONDS)
        assert place.own.reach == replace(lie, by_members=True)
    assert place.decided > 3 and hidden == [True] * lie.relayed
    assert len(place.tasks) == own_addresses.RELAYS * lie.relayed
    place.found = Reachability()
    await asyncio.sleep(1.5 * LOOK_AGAIN_SECONDS)
    assert hidden == [True, False] * lie.relayed and place.own.all == (f"{PUBLIC}/p2p/{ME}",)
    assert all(task.cancelled() for task in place.tasks), "it needs no reservations any more"
    watching.cancel()
