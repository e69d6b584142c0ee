"""Join the DHT through nodes that were reached, stay connected to them, and explain a refusal in one line."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from hivemind.proto import dht_pb2

from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.p2p.addresses import owner_of
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.admission.gate import ADMISSION_PROTOCOL, Knock, Notice, why_refused
from peer.p2p.admission.invitation import Certificate
from peer.p2p.dht.authors import Author
from peer.p2p.dht.requests import place_of_node
from peer.p2p.dial import Unreachable, dial, parsed_id
from peer.p2p.stream import MESSAGE_TIMEOUT, Stream

log = get_logger("node")

CLOCK_TOLERANCE = 3.0  # seconds; hivemind refuses more
DHT_TIMEOUT = 2.0  # seconds for one DHT request: a frozen member must not delay a whole search
NOTICE_TIMEOUT = 5.0  # seconds for a notice
PING_TIMEOUT = 5.0  # seconds
PINGS = 3  # of an initial peer that is connected and answers late
REDIAL_SECONDS = 20.0  # between two checks of the initial peers
AWAY_SECONDS = 5.0  # the same while one of them does not answer


async def join_dht(p2p: P2P, reached: Sequence[str], author: Author, *, client: bool) -> DHTNode:
    """hivemind's DHT node on ``p2p``. ``client``: it stores no records for others, as they could not dial it.

    Raises :class:`UserError` when this peer's invitation is refused, otherwise :class:`RunError`: a DHT may answer
    later, and a clock may be set.
    """
    try:
        return await DHTNode.create(
            p2p,
            node_id=place_of_node(p2p.peer_id),
            initial_peers=list(reached),
            wait_timeout=DHT_TIMEOUT,
            backoff_rate=1.0,  # hivemind would double the time for which it ignores a member after each failure
            ensure_bootstrap_success=bool(reached),
            client_mode=client,
            record_validator=author.validator,
            cache_locally=False,  # each look asks the nodes anyway
            cache_nearest=0,
            cache_on_store=False,
        )
    except Exception as error:  # noqa: BLE001 - hivemind's own type is not exported
        refused = await _why_refused(p2p, reached, author)
        if refused:
            raise UserError(refused) from None
        raise RunError(_why_not_joined(str(error), reached)) from None


def become_client(dht: DHTNode, client: bool = True) -> None:
    """From now on this node says with its requests that others should not ask it; else that they may ask it again."""
    known = {} if client else {"node_id": dht.node_id.to_bytes()}
    dht.protocol.client_mode, dht.protocol.node_info = client, dht_pb2.NodeInfo(**known)


class Touch(Enum):
    """State of an initial peer. ``SILENT``: it can be dialled, and its DHT does not answer us."""

    ANSWERS, SILENT, AWAY = range(3)


async def keep_in_touch(
    p2p: P2P, dht: DHTNode, addresses: Sequence[str], silent: Callable[[str], Awaitable[None]]
) -> None:
    """Reconnect to the initial peers and their DHT after an outage; no layer below does it.

    ``silent``: called with the address of each one that is connected and whose DHT does not answer.
    """
    pause = REDIAL_SECONDS
    while addresses:
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # not all members at once
        pause = REDIAL_SECONDS
        for address in addresses:
            for _ in range(PINGS):  # one may be late behind a swap on a slow line, which shall not be cut
                touch = await get_in_touch(p2p, dht, owner_of(address), [address])
                if touch is not Touch.SILENT:
                    break
            if touch is not Touch.ANSWERS:
                pause = AWAY_SECONDS
            if touch is Touch.SILENT:
                await silent(address)


async def get_in_touch(p2p: P2P, dht: DHTNode, peer_id: str, addresses: Sequence[str]) -> Touch:
    """Connect to a node and let our DHT know it, for the first time or again."""
    with contextlib.suppress(Unreachable, OSError, TimeoutError):
        await dial(p2p, peer_id, addresses, PING_TIMEOUT)
        async with asyncio.timeout(PING_TIMEOUT):  # the DHT forgets a node that did not answer, until a ping
            answer = await dht.protocol.call_ping(parsed_id(peer_id))
            if answer is not None:
                dht.blacklist.register_success(parsed_id(peer_id))  # else it is no anchor any more (anchors.py)
            return Touch.SILENT if answer is None else Touch.ANSWERS
    return Touch.AWAY


def neighbours(dht: DHTNode) -> set[str]:
    """Ids of the nodes that our DHT knows."""
    return {str(peer_id) for peer_id in dht.protocol.routing_table.uid_to_peer_id.values()}


async def asked_in_vain(p2p: P2P, dht: DHTNode, addresses: Sequence[str]) -> bool:
    """Did a node fail to answer the DHT's last request? Then a record that was not found may exist all the same.

    hivemind ignores a node for a while that was late once; this ends it, so that the search can be repeated.
    """
    silent = {str(peer_id) for peer_id, times in dht.blacklist.ban_counter.items() if times}
    dht.blacklist.clear()
    for address in addresses:
        for _ in range(PINGS if owner_of(address) in silent else 0):
            if await get_in_touch(p2p, dht, owner_of(address), [address]) is not Touch.SILENT:
                break
    return bool(silent)


async def notice_of(p2p: P2P, peer_id: str, own: Certificate | None) -> Notice | None:
    """The node's verdict on a certificate; ``None`` when it does not answer or its swarm is open."""
    try:
        async with asyncio.timeout(NOTICE_TIMEOUT):
            _, reader, writer = await p2p.call_binary_stream_handler(parsed_id(peer_id), ADMISSION_PROTOCOL)
            with contextlib.closing(Stream(reader, writer, remote=peer_id, initiator=True)) as stream:
                await stream.send(Knock(certificate=own), MESSAGE_TIMEOUT)
                return await stream.receive(Notice, MESSAGE_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - p2pd reports every failure as a different type
        log.debug("no notice from %s: %s", peer_id, error)
        return None


async def _why_refused(p2p: P2P, reached: Sequence[str], author: Author) -> str:
    """The objection of a reached node to our invitation; empty when that is not why its DHT does not answer."""
    own = author.admission.own if isinstance(author, Authority) else None
    for address in reached:
        notice = await notice_of(p2p, owner_of(address), own)
        if notice is not None:
            return why_refused(address, notice, own)
    return ""


def _why_not_joined(error: str, reached: Sequence[str]) -> str:
    clocks = re.search(r"local: ([\d.]+), peer: ([\d.]+)", error)
    if clocks:
        return wrong_clock(float(clocks[1]) - float(clocks[2]), reached[0])
    return f"joined {reached[0]} but its DHT does not answer: {error}"


def wrong_clock(ahead: float, address: str) -> str:
    """One line for a local clock that is ``ahead`` seconds ahead of a node's (negative: behind it)."""
    return (
        f"this machine's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {address}; "
        f"at most {CLOCK_TOLERANCE:.0f} s are allowed. Set it by NTP, for example: timedatectl set-ntp true"
    )
