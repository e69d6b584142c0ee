"""Checks through the network: initial peers, clocks, reachability, members.

The check listens on the peer's port, or on another one while the peer uses that, with a temporary key, so that a
running peer is not disturbed. A swarm with invitations needs the invited key; there it is not made beside the peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from peer.commands.check.finding import Finding, Subject, fail, ok, warn
from peer.commands.check.local import own_folder, port_is_free
from peer.commands.check.members import members
from peer.commands.check.reach import direct, reachability, relays
from peer.config.digest import canonical, digest
from peer.config.schema import NetworkConfig
from peer.errors import UserError
from peer.p2p.addresses import owner_of
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.deadline import THREAD_GRACE
from peer.p2p.dht.join import CLOCK_TOLERANCE, wrong_clock
from peer.p2p.dial import Unreachable, check_address, dial
from peer.p2p.greeting import MemberIdentity, MemberNode, guest_node
from peer.p2p.reachability.cloud import find
from peer.p2p.reachability.decide import View, look
from peer.p2p.settings import NodeSettings

INITIAL_PEER_TIMEOUT = 10.0  # seconds for one initial peer
VIEW_TIMEOUT = 120.0  # seconds; usually two
CLOCK_WARNING = 1.0  # seconds; hivemind refuses more than three


def network(config: Subject, *, speed: bool = False) -> Iterator[Finding]:
    """Start a node, run the checks and stop it. ``speed``: measure the line to members too."""
    run, own = config.run, config.peer.network
    cloud = None if own.announce or own.reach == "relay" else find(own.host, own.port)
    if cloud is not None:
        yield ok("announce", cloud.text) if cloud.address else warn("announce", cloud.text, cloud.advice)
        own = own.model_copy(update={"announce": (cloud.address,) if cloud.address else ()})
    if run.owner is not None and config.peer.invitation is None:
        raise UserError("the network cannot be checked without an invitation")
    if run.owner is not None and (folder := own_folder(config)) is not None:
        yield warn("network", f"not checked: the peer in {folder} has the same invitation", "end it first")
        return
    port = own.port if port_is_free(own.host, own.port) else 0
    settings = NodeSettings.of(own.model_copy(update={"port": port}), None)
    invitation = None if run.owner is None else config.peer.invitation
    # the layout stays empty: a member compares the configurations first
    member = MemberIdentity("check", run.name, digest(run), canonical(run), layout="")
    with guest_node(settings, invitation, run.owner, member) as (node, authority):
        yield from _with(node, config, own, authority, speed)


def _with(
    node: MemberNode, config: Subject, own: NetworkConfig, authority: Authority | None, speed: bool
) -> Iterator[Finding]:
    wanted = config.peer.initial_peers
    if not wanted:
        said = "none given: clock, reachability and the swarm are not checked"
        yield warn("initial peers", said, "give --initial-peers")
        return
    answering: list[str] = []
    for address in wanted:
        finding = _dialled(node, address)
        yield finding
        if finding.level == "ok":
            answering.append(address)
    if not answering:
        advice = "start a bootstrap node (noloco-bootstrap), and read the lines above"
        yield fail("initial peers", "none answers", advice)
        return
    views, _ = node.call(look(node.open, node.visible, answering, own.upnp), VIEW_TIMEOUT)
    time = clock(views, answering[0])
    yield time
    if time.level == "fail":
        return  # the DHT would refuse this peer
    yield from reachability(views, own)
    yield from direct(node, views, own)
    yield from relays(node, views, own)
    yield from members(node, config, authority, answering, speed=speed)


def _dialled(node: MemberNode, address: str) -> Finding:
    try:
        check_address(address)
        dialled = dial(node.p2p, owner_of(address), [address], INITIAL_PEER_TIMEOUT)
        node.call(dialled, INITIAL_PEER_TIMEOUT + THREAD_GRACE)
    except UserError as error:
        return fail("initial peers", str(error), "correct peer.initial_peers")
    except Unreachable as error:
        return warn("initial peers", f"{address}: {error}", _why_silent(str(error)))
    return ok("initial peers", f"{address} answers")


def _why_silent(reason: str) -> str:
    if "mismatch" in reason:
        return "another node has this address: use the address that noloco-bootstrap prints now"
    if "refused" in reason:
        return "its machine answers, but nothing listens there: is the node running, and is this its port?"
    return "is its machine on, and is the port open in its firewall and in yours?"


def clock(views: list[View], address: str) -> Finding:
    """Compare this clock with those of the initial peers, without hivemind."""
    if not views:
        return warn("clock", "no initial peer tells its time", f"are they an older noloco-peer? ({address})")
    ahead = median(it.heard.ahead for it in views)
    apart = f"{abs(ahead):.2f} s apart from the initial peers', {CLOCK_TOLERANCE:.0f} s are allowed"
    if abs(ahead) > CLOCK_TOLERANCE:
        said, _, advice = wrong_clock(-ahead, views[0].address).partition(". ")
        return fail("clock", said, advice)
    return warn("clock", apart, "timedatectl set-ntp true") if abs(ahead) > CLOCK_WARNING else ok("clock", apart)
