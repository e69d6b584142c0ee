"""Can others dial this machine, and is there a relay when they cannot?"""

from __future__ import annotations

from collections.abc import Iterator

from peer.commands.check.finding import Finding, ok, warn
from peer.config.schema import NetworkConfig
from peer.errors import UserError
from peer.p2p.addresses import is_private, tcp_of, tcp_place
from peer.p2p.bulk.listener import BulkListener
from peer.p2p.bulk.offer import beside, listen, outside
from peer.p2p.node import Node
from peer.p2p.reachability.decide import View, dialled_back
from peer.p2p.reachability.reservations import try_reservation
from peer.p2p.stream import BadMessage, StreamLost

RELAY_TIMEOUT = 15.0  # seconds for one relay
WHY = {
    "refused": "the connection was refused: nothing listens there, or a firewall refuses it",
    "timeout": "no answer: a firewall or a NAT drops it",
    "another": "something else answers there",
    "not_yours": "not where this machine's connections come from",
}


def reachability(views: list[View], network: NetworkConfig) -> Iterator[Finding]:
    """One finding for each node that dials back, and for each announced address that no node sees."""
    asked = [it for it in views if it.heard.answer.observed]
    if not asked:
        yield warn("reachability", "no initial peer can dial back", "give the address of a newer or less busy node too")
        return
    for it in asked:
        observed = it.heard.answer.observed
        if it.reached:
            scope = ", from the same local network" if is_private(observed) else ""
            if scope and network.reach == "auto" and not network.announce:
                scope += "; others reach it through a relay"
            yield ok("reachability", f"{_name(it)} has dialled {it.reached[0]}{scope}")
            continue
        results = "; ".join(f"{place}: {WHY[result]}" for place, result in it.tried.items())
        said = f"{_name(it)} sees this machine as {observed} and cannot dial it ({results or 'no port to try'})"
        yield warn("reachability", said, _advice(network))
    yield from _announced(asked, network)


def _advice(network: NetworkConfig) -> str:
    if network.reach == "public":
        return "open the port, or set peer.network.reach=auto (relays) instead of public"
    direct_port = beside(network.port) if network.bulk_port == "auto" else network.bulk_port
    ports = f"TCP {network.port}" if direct_port == "off" else f"TCP {network.port} and {direct_port}"
    which = ports if network.port else "a port (fix it with peer.network.port)"
    router = "the router has not opened it by UPnP:" if network.upnp else "set peer.network.upnp=true, or"
    return (
        f"training works all the same, through relays (peer.network.reach={network.reach}); for direct connections: "
        f"{router} forward {which} to this machine in the router and open it in the firewall"
    )


def _announced(asked: list[View], network: NetworkConfig) -> Iterator[Finding]:
    """Announced addresses are not verified elsewhere: warn when the others see another one."""
    seen = {it.heard.answer.observed for it in asked}
    for address in network.announce:
        place = tcp_of(address)
        if place is not None and place[0] not in seen:
            said = f"{address} is announced, and this machine is seen as {', '.join(sorted(seen))}"
            yield warn("announce", said, "set peer.network.announce to where others reach it, or let auto find it")


def direct(node: Node, views: list[View], network: NetworkConfig) -> Iterator[Finding]:
    """Can others dial the port for direct connections, where they can dial the first one?"""
    reached = [it for it in views if it.reached]
    if network.bulk_port == "off" or not reached:
        return
    listener = BulkListener(lambda _: None)
    try:
        port = outside(network.host, listen(listener, network.host, network.port, network.bulk_port))
    except UserError as error:
        yield warn("direct", str(error), "or end the peer that runs here")
        return
    node.spawn(listener.run())
    where = tcp_place(reached[0].heard.answer.observed, port) if port else ""
    try:
        result = node.call(dialled_back(node.open, reached[0].address, where), RELAY_TIMEOUT) if where else "refused"
    except (StreamLost, BadMessage, TimeoutError):
        return
    if result == "another":  # somebody answers who is no libp2p node: this listener
        yield ok("direct", f"{_name(reached[0])} has dialled {where}, for direct connections")
    elif result is not None:
        said = f"{_name(reached[0])} cannot dial {where or 'a port that the cloud does not map'} ({WHY[result]})"
        advice = f"open and forward TCP {port or 'peer.network.bulk_port'} too; until then parts go over the p2p stream"
        yield warn("direct", said, advice)


def relays(node: Node, views: list[View], network: NetworkConfig) -> Iterator[Finding]:
    """Do the initial peers have a relay slot for a machine that cannot be dialled?"""
    asked = [it for it in views if it.heard.answer.observed]
    if network.reach != "relay" and (not asked or all(it.reached for it in asked)):
        return
    for it in views:
        try:
            node.call(try_reservation(node.open, it.address), RELAY_TIMEOUT)
        except (StreamLost, BadMessage, TimeoutError) as error:
            said = f"{_name(it)} gives no slot: {str(error) or 'no answer'}"
            yield warn("relay", said, "name another bootstrap node or a reachable peer in peer.initial_peers")
        else:
            yield ok("relay", f"{_name(it)} relays to this machine while it cannot be dialled")


def _name(it: View) -> str:
    """The address of an initial peer without its identity."""
    return it.address.partition("/p2p/")[0]
