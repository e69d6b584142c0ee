"""Reach a peer by its addresses, and name the reason when that fails.

Two peers that dial each other at the same moment both fail: libp2p dials from its listening port, and TCP then opens
one connection for both, without a server. libp2p refuses to dial again for 5 seconds; callers that must reach a peer
retry after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer import clock
from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.p2p.addresses import CIRCUIT, is_circuit, owner_of, place_of

log = get_logger("dial")
ATTEMPT_SECONDS = 10.0  # for one attempt
DISCONNECT_SECONDS = 5.0  # for the daemon to close a connection
COUNT_SECONDS = 5.0  # for the daemon to list its connections
# Seconds until all initial peers are tried again: at first, as they may be starting too; at most, doubled each time
FIRST_REDIAL, LAST_REDIAL = 0.5, 10.0
KNOWN_IDS = 4096  # that are remembered
BACKOFF = "dial backoff"
HOPELESS = "peer id mismatch"  # another node has the address: a repetition finds it again
KNOWN_REASONS = ("connection refused", "no route to host", "network is unreachable", "i/o timeout", "peer id mismatch")
_P2P, _P2P_CIRCUIT = b"\xa5\x03", b"\xa2\x02"  # multicodec's numbers 421 and 290 as varints


class Unreachable(Exception):
    """No address of a peer answered; the text is the reason."""


@lru_cache(KNOWN_IDS)
def parsed_id(peer_id: str) -> PeerID:
    """hivemind decodes base58 in Python: 0.1 ms. Raises ``ValueError`` for what is no id."""
    return PeerID.from_base58(peer_id)


async def dial(p2p: Any, peer_id: str, addresses: Sequence[str], timeout: float) -> None:
    """Connect to ``peer_id``; cheap when it is connected already. Raises :class:`Unreachable`."""
    try:
        places = [_multiaddr(place_of(address)) for address in addresses]
        async with asyncio.timeout(timeout):
            await p2p._client.connect(parsed_id(peer_id), places)
    except TimeoutError:
        raise Unreachable(f"no answer within {timeout:.0f} s") from None
    except Exception as error:  # noqa: BLE001 - p2pd reports every failure as a different type
        raise Unreachable(_reason(str(error))) from None


async def disconnect(p2p: Any, peer_id: str) -> None:
    """Close the connections to a peer, if there are any."""
    with contextlib.suppress(Exception):  # p2pd has a type for every failure; the connection is gone then
        async with asyncio.timeout(DISCONNECT_SECONDS):
            await p2p._client.disconnect(parsed_id(peer_id))


async def count_peers(p2p: Any) -> int:
    """Peers that a node is connected to. Raises :class:`RunError` when its daemon does not answer."""
    async with asyncio.timeout(COUNT_SECONDS):
        try:
            return len(await p2p.list_peers())
        except OSError as error:
            raise RunError(f"the p2p daemon does not answer: {error}") from None


async def connect_any(p2p: Any, addresses: Sequence[str], timeout: float) -> list[str]:
    """The addresses that answered. Tries all, again and again with growing pauses, for ``timeout`` seconds; once where
    other nodes have them.

    Raises :class:`RunError` that names every address with its reason: a node may be back later. :class:`UserError`
    where a repetition does not help: for what is no address, and where other nodes have all of them.
    """
    for address in addresses:
        check_address(address)
    deadline, pause = clock.monotonic() + timeout, FIRST_REDIAL
    reasons: dict[str, str] = {}
    while addresses:
        reached: list[str] = []
        for address in addresses:
            try:
                await dial(p2p, owner_of(address), [address], ATTEMPT_SECONDS)
                reached.append(address)
            except Unreachable as error:
                # libp2p refuses to try again for a few seconds after a failure: keep the first reason
                if BACKOFF not in str(error) or address not in reasons:
                    reasons[address] = str(error)
        hopeless = all(HOPELESS in reason for reason in reasons.values())
        again = not (reached or hopeless or clock.monotonic() + pause > deadline)
        for address in [it for it in addresses if it not in reached]:
            log.warning("initial peer %s: %s%s", address, reasons[address], "; trying again" if again else "")
        if reached:
            return reached
        if not again:
            tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
            raise (UserError if hopeless else RunError)(
                f"cannot reach any initial peer ({tried}). Check that the bootstrap node runs, that the address is "
                "the one it printed, and that its port is open in its firewall"
            )
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        pause = min(2 * pause, LAST_REDIAL)
    return []


def check_address(address: str) -> None:
    """Raises :class:`UserError` for something that is not ``/ip4/HOST/tcp/PORT/p2p/ID``."""
    try:
        parsed_id(Multiaddr(address)["p2p"])
    except Exception:  # noqa: BLE001 - the multiaddr parser raises many types
        raise UserError(
            f"initial peer {address!r} is not an address; it looks like /ip4/203.0.113.7/tcp/31337/p2p/Qm..."
        ) from None
    if is_circuit(address):
        raise UserError(
            f"initial peer {address!r} is reached through a relay and cannot be an initial peer; name the relay, "
            f"{address.partition(CIRCUIT)[0]}"
        )


@lru_cache(KNOWN_IDS)
def _multiaddr(place: str) -> Multiaddr:
    """With the relay's id as the daemon reads it: hivemind writes it into a circuit address as a CID."""
    relay, circuit, rest = place.partition(CIRCUIT)
    if not circuit or rest:
        return Multiaddr(place)
    identity = parsed_id(owner_of(relay)).to_bytes()
    direct = Multiaddr(place_of(relay)).to_bytes()
    return Multiaddr(direct + _P2P + bytes([len(identity)]) + identity + _P2P_CIRCUIT)


def _reason(error: str) -> str:
    for known in KNOWN_REASONS:
        if known in error:
            return known
    return " ".join(error.split())[-200:]
