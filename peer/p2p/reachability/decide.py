"""Decide how others reach this node: by its own addresses, by an address that only they see, or through relays.

``peer.network.reach: auto`` asks the initial peers to dial back (dialback.py). A node that they cannot dial is behind a
NAT or a firewall, and reservations.py keeps it reachable through relays.

The initial peers are believed: the user has named them. Where none of them answers, members are asked, of whom one may
lie: what two of them say counts, and what another one contradicts does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from peer.logs import fields, get_logger
from peer.p2p.addresses import is_loopback, is_of_private_network, is_private, owner_of, place_of, tcp_of, tcp_place
from peer.p2p.deadline import running
from peer.p2p.reachability.dialback import Heard, Result, ask
from peer.p2p.stream import BadMessage, Open, StreamLost

log = get_logger("reach")

ASKED = 3  # initial peers, or members
AGREE = 2  # of the members
UPNP_SECONDS = 6.0  # for the router to answer
UPNP_PAUSE = 1.0  # seconds between two looks whether it has
DECIDE_SECONDS = 45.0  # for one group of nodes to answer; less than the caller's DECIDE_TIMEOUT
VIEW_SECONDS = 30.0  # for the answer of a node, which may be busy: many peers may start at once
OTHERS_SECONDS = 6.0  # for those of the others when there is one
SEEN_SECONDS = 10.0  # for a node to say as whom it sees us
FAILED_PAUSE = 2.0  # before a node that did not answer is asked again

Visible = Callable[[], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class Reachability:
    """``relayed``: nobody can dial this node. ``local``: those of its own network can, as far as is known.

    ``unknown``: nobody could tell; until somebody does, others are taken to reach it.
    ``announce``: multiaddrs instead of the detected ones, when there are any. ``by_members``: only members say that
    this node is not reached by addresses of its own, so it asks again.
    """

    relayed: bool = False
    local: bool = False
    unknown: bool = False
    announce: tuple[str, ...] = ()
    by_members: bool = False


@dataclass(frozen=True)
class View:
    """The answer of one other node about this one. ``tried``: results by address."""

    address: str
    heard: Heard
    tried: dict[str, str]

    @property
    def reached(self) -> list[str]:
        """Addresses at which it could dial us."""
        return [place for place, result in self.tried.items() if result == "reached"]


async def decide(
    open_stream: Open, visible: Visible, asked: Sequence[str], upnp: bool = False, otherwise: Sequence[str] = ()
) -> Reachability:
    """By the answers of the nodes ``asked`` (addresses with ids), or of the members ``otherwise`` when none of them
    answers. Without an answer others are taken to reach us.
    """
    for group, conclude in ((asked, _concluded), (otherwise, _agreed)):
        views, places = list[View](), frozenset[str]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DECIDE_SECONDS):
                views, places = await look(open_stream, visible, group, upnp)
        views = [it for it in views if it.heard.answer.observed]
        if views:
            return conclude(views, places)
    log.info("nobody can tell whether others can dial this peer: it is taken to be so until somebody can")
    return Reachability(unknown=True)


async def look(
    open_stream: Open, visible: Visible, asked: Sequence[str], upnp: bool
) -> tuple[list[View], frozenset[str]]:
    """Answers of some of the nodes ``asked``, and our own addresses. ``upnp``: wait for the router to add one."""
    chosen = list({owner_of(address): address for address in asked}.values())[:ASKED]
    found: list[View] = []
    places: frozenset[str] = frozenset()
    for number in range(1 + int(UPNP_SECONDS / UPNP_PAUSE) if upnp else 1):
        if number:
            await asyncio.sleep(UPNP_PAUSE)
        now = frozenset(place_of(address) for address in await visible())
        if now == places:
            continue  # the router has added nothing
        places = now
        found = await _views(open_stream, chosen, sorted(places))
        if all(it.reached or not it.heard.answer.observed for it in found):
            break
    return found, places


async def _views(open_stream: Open, chosen: Sequence[str], places: Sequence[str]) -> list[View]:
    async with running(*(view(open_stream, address, places) for address in chosen)) as tasks:
        left, found = set(tasks), list[View]()
        while left:
            done, left = await asyncio.wait(
                left, timeout=OTHERS_SECONDS if found else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            found = [it for task in tasks if task.done() and (it := task.result()) is not None]
        return found


def _concluded(found: Sequence[View], places: frozenset[str]) -> Reachability:
    """By the views of initial peers."""
    if not all(it.reached for it in found):
        seen = sorted({it.heard.answer.observed for it in found})
        log.info("others cannot dial this peer (NAT or firewall), it uses relays: %s", fields(seen_as=",".join(seen)))
        return Reachability(relayed=True)
    return _dialled(found, [place for it in found for place in it.reached], places, log.info)


def _agreed(found: Sequence[View], places: frozenset[str]) -> Reachability:
    """By the views of members."""
    votes = Counter(place for it in found for place in it.reached)
    reached = [place for place, count in votes.items() if count >= AGREE]
    if reached:
        believed = [it for it in found if not {*reached}.isdisjoint(it.reached)]
        reach = _dialled(believed, reached, places, log.debug)  # it is asked again: own_addresses.py says a change
        return replace(reach, by_members=bool(reach.announce))
    if votes or len(found) < AGREE:
        log.debug("members do not agree whether they can dial this peer")
        return Reachability(unknown=True)
    log.debug("members cannot dial this peer (NAT or firewall)")
    return Reachability(relayed=True, by_members=True)


def _dialled(
    found: Sequence[View], reached: Sequence[str], places: frozenset[str], say: Callable[..., None]
) -> Reachability:
    """``reached``: the addresses at which those of ``found`` could dial us."""
    local = all(is_private(it.heard.answer.observed) for it in found)
    if local:
        say("others dial this peer by a private address, those of other networks use a relay")
    unknown = [place for place in dict.fromkeys(reached) if place not in places]
    if not unknown:
        return Reachability(local=local)
    say("others dial this peer by an address that is not this machine's: %s", fields(address=unknown[0]))
    left = [it for it in sorted(places) if it in reached or is_of_private_network(it)]  # public: one that we had before
    return Reachability(local=local, announce=(*unknown, *(it for it in left if not is_loopback(it))))


async def view(open_stream: Open, address: str, places: Sequence[str]) -> View | None:
    """The answer of the node at ``address``; ``None`` when it gives none.

    It tries those of our addresses ``places`` that have the IP address that it sees, and that IP address with our port.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(VIEW_SECONDS):
            heard = await _patiently(open_stream, address, [])
            wanted = _wanted(heard.answer.observed, places)
            if not wanted:
                return View(address, heard, {})
            tried = {it.place: it.result for it in (await _patiently(open_stream, address, wanted)).answer.tried}
            return View(address, heard, {place: str(tried[place]) for place in wanted if place in tried})
    return None


async def _patiently(open_stream: Open, address: str, places: Sequence[str]) -> Heard:
    """The answer of the node at ``address``, asked again while it is busy or silent. The caller sets the deadline."""
    while True:
        pause, reason = FAILED_PAUSE, "it is busy"
        try:
            heard = await ask(open_stream, owner_of(address), [address], places)
            if isinstance(heard, Heard):
                return heard
            pause = heard.seconds
        except (StreamLost, BadMessage, TimeoutError) as error:
            reason = str(error) or "no answer"
        log.debug("no view, asking again: %s", fields(address=address, reason=reason))
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))


async def seen_as(open_stream: Open, address: str) -> str:
    """The IP address as which the node at ``address`` sees us; empty when it does not say."""
    with contextlib.suppress(StreamLost, BadMessage, TimeoutError):
        async with asyncio.timeout(SEEN_SECONDS):
            heard = await ask(open_stream, owner_of(address), [address], [])
            return heard.answer.observed if isinstance(heard, Heard) else ""
    return ""


async def dialled_back(open_stream: Open, address: str, place: str) -> Result | None:
    """What the node at ``address`` finds at ``place``, or ``None`` when it does not say. Raises as :func:`ask`."""
    heard = await ask(open_stream, owner_of(address), [address], [place])
    return heard.answer.tried[0].result if isinstance(heard, Heard) and heard.answer.tried else None


def _wanted(observed: str, places: Sequence[str]) -> list[str]:
    found = [it for it in map(tcp_of, places) if it is not None]
    if not observed or not found:
        return []
    wanted = [tcp_place(*it) for it in found if it[0] == observed]
    return list(dict.fromkeys([*wanted, *(tcp_place(observed, port) for _, port in found)]))
