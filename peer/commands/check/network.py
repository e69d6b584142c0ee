"""Through the network: do initial peers answer, do the clocks agree, can others dial this machine, who is in the swarm?

It listens on the port of the settings, as the peer would, with a key of its own that is thrown away: a peer that is
running with the real one is not disturbed. (In a swarm of invited peers it must be the invited key; not while the peer
runs.)
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from peer.commands.check.finding import Finding, Subject, fail, ok, warn
from peer.commands.check.local import port_is_free
from peer.commands.check.reach import reachability, relays
from peer.config.digest import canonical, digest
from peer.errors import UserError

if TYPE_CHECKING:
    from peer.p2p.admission.dht_rules import Authority
    from peer.p2p.greeting import MemberNode
    from peer.p2p.reachability.decide import View

INITIAL_PEER_TIMEOUT = 10.0  # seconds for one initial peer
VIEW_TIMEOUT = 120.0  # seconds; usually two
CLOCK_WARNING = 1.0  # seconds; hivemind refuses more than three


def network(config: Subject) -> Iterator[Finding]:
    """Starts a node, and stops it whatever happens."""
    from peer.p2p.greeting import MemberIdentity, guest_node
    from peer.p2p.node import NodeSettings

    run, own = config.run, config.peer.network
    if run.owner is not None and config.peer.invitation is None:
        raise UserError("without an invitation nothing of the network can be looked at")
    port = own.port if port_is_free(own.host, own.port) else 0
    settings = NodeSettings.of(own.model_copy(update={"port": port}), None)
    invitation = None if run.owner is None else config.peer.invitation
    # without the model's layout: a member with another configuration says that first
    member = MemberIdentity("check", run.name, digest(run), canonical(run), layout="")
    with guest_node(settings, invitation, run.owner, member) as (node, authority):
        yield from _with(node, config, authority)


def _with(node: MemberNode, config: Subject, authority: Authority | None) -> Iterator[Finding]:
    from peer.commands.check.members import members

    wanted = config.peer.initial_peers
    if not wanted:
        yield warn(
            "initial peers", "none given: clock, reachability and the swarm are not looked at", "give --initial-peers"
        )
        return
    answering: list[str] = []
    for address in wanted:
        finding = _dialled(node, address)
        yield finding
        if finding.level == "ok":
            answering.append(address)
    if not answering:
        yield fail("initial peers", "none answers", "start one: noloco-bootstrap, and look at the lines above")
        return
    views = _views(node, answering, config.peer.network.upnp)
    for finding in clock(views, answering):
        yield finding
        if finding.level == "fail":
            return  # the DHT would not take us
    yield from reachability(views, config.peer.network)
    yield from relays(node, views, config.peer.network)
    yield from members(node, config, authority, answering)


def _dialled(node: MemberNode, address: str) -> Finding:
    from peer.p2p.addresses import owner_of
    from peer.p2p.dial import Unreachable, check_address, dial

    try:
        check_address(address)
        node.call(dial(node.p2p, owner_of(address), [address], INITIAL_PEER_TIMEOUT), INITIAL_PEER_TIMEOUT + 5)
    except UserError as error:
        return fail("initial peers", str(error), "correct peer.initial_peers")
    except Unreachable as error:
        return warn("initial peers", f"{address}: {error}", _why_silent(str(error)))
    return ok("initial peers", f"{address} answers")


def _why_silent(reason: str) -> str:
    if "mismatch" in reason:
        return "another node has its place: take the address that noloco-bootstrap prints now"
    if "refused" in reason:
        return "its machine answers and nothing listens there: is the node running, is that its port?"
    return "is its machine on, and is the port open in its firewall and in yours?"


def _views(node: MemberNode, answering: list[str], upnp: bool) -> list[View]:
    from peer.p2p.reachability.decide import look

    views, _ = node.call(look(node.open, node.visible, answering, upnp), VIEW_TIMEOUT)
    return views


def clock(views: list[View], answering: list[str]) -> Iterator[Finding]:
    """By what the initial peers say; hivemind takes no part in it."""
    from peer.p2p.dht import CLOCK_TOLERANCE, wrong_clock

    if not views:
        yield warn("clock", "no initial peer tells its time", f"are they an older noloco-peer? ({answering[0]})")
        return
    behind = median(it.heard.ahead for it in views)
    apart = f"{abs(behind):.2f} s apart from the initial peers'"
    if abs(behind) > CLOCK_TOLERANCE:
        said, _, advice = wrong_clock(-behind, views[0].address).partition(". ")
        yield fail("clock", said, advice)
    elif abs(behind) > CLOCK_WARNING:
        yield warn("clock", f"{apart}, {CLOCK_TOLERANCE:.0f} s are allowed", "timedatectl set-ntp true")
    else:
        yield ok("clock", f"{apart}, {CLOCK_TOLERANCE:.0f} s are allowed")
