"""The members of the swarm: do they have the same configuration and protocols, does one have this peer's key?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from peer import __version__
from peer.commands.check.finding import Finding, Subject, fail, ok, warn
from peer.commands.check.local import identity_file, own_folder
from peer.commands.check.speed import lines
from peer.config.digest import digest
from peer.errors import one_line
from peer.exchange.group.streams import REDUCE_PROTOCOL
from peer.p2p import identity
from peer.p2p.admission import gate
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.greeting import MemberNode
from peer.p2p.reachability import dialback, relay
from peer.p2p.reachability.dialback import Busy, ask
from peer.p2p.speed import SPEED_PROTOCOL
from peer.p2p.stream import BadMessage, StreamLost
from peer.swarm.directory.directory import present_members
from peer.swarm.directory.duplicate_identity import DUPLICATE_TIMEOUT, duplicate_of
from peer.swarm.directory.records import MemberRecord
from peer.swarm.grouping.known_members import GATHER_PROTOCOL
from peer.swarm.pairing.proposals import MEET_PROTOCOL
from peer.swarm.state_transfer.donor import STATE_PROTOCOL

DHT_JOIN_TIMEOUT = 60.0  # seconds
MEMBER_TIMEOUT = 15.0  # seconds for one member
ASKED_MEMBERS = 3  # members


def members(
    node: MemberNode, config: Subject, authority: Authority | None, answering: Sequence[str], *, speed: bool
) -> Iterator[Finding]:
    """Join the DHT as a client; raises :class:`peer.errors.UserError` when it refuses."""
    node.call(node.join(answering, client=True), DHT_JOIN_TIMEOUT)
    yield from _duplicate(node, config, authority)
    present = present_members(node, config.run.name)
    if not present:
        yield ok("swarm", f"no peer trains {config.run.name!r} there yet: this one would be the first")
        if speed:
            yield from lines(node, config, [])
        return
    own = digest(config.run)
    same = [record for record in present if record.config == own]
    others = [record for record in present if record.config != own]
    if same:
        names = ", ".join(record.name for record in same[:ASKED_MEMBERS])
        who = f"{len(same)} members train" if len(same) > 1 else "1 member trains"
        yield ok("swarm", f"{who} this configuration ({own}): {names}")
    if others:
        said = f"{others[0].name} trains another configuration: {_difference(node, config, others[0])}"
        yield (warn if same else fail)("config", said, "take the swarm's file; noloco-peer show-config prints this one")
    some = random.sample(same, min(ASKED_MEMBERS, len(same)))
    yield from _versions(node, some)
    if speed:
        yield from lines(node, config, some, of=same)


def _duplicate(node: MemberNode, config: Subject, authority: Authority | None) -> Iterator[Finding]:
    """Is a peer alive that has the key of this one?"""
    if own_folder(config) is not None:
        return  # it is the peer that runs here
    path, peer_id = identity_file(config), node.peer_id
    if authority is None:
        if path is None or not path.exists():
            return
        peer_id = identity.load_or_create(path)
    duplicate = node.call(duplicate_of(node, config.run.name, peer_id), DUPLICATE_TIMEOUT)
    if duplicate is not None:
        said = f"a peer with the same identity is alive: {duplicate.name} at {', '.join(duplicate.addresses[:2])}"
        yield fail("identity", said, "each peer needs a key (peer.identity) or an invitation of its own")


def _difference(node: MemberNode, config: Subject, record: MemberRecord) -> str:
    """The first key in which a member's run differs, from its refusal."""
    refused = node.call(node.refused_by(record.peer_id, STATE_PROTOCOL, record.addresses), 2 * MEMBER_TIMEOUT)
    if refused is not None:
        return node.member.difference(refused)
    return f"its digest is {record.config}, ours {digest(config.run)}"


def _versions(node: MemberNode, records: Sequence[MemberRecord]) -> Iterator[Finding]:
    own = spoken()
    for record in records:
        try:
            it = node.call(ask(node.open, record.peer_id, record.addresses, []), 2 * MEMBER_TIMEOUT)
        except (StreamLost, BadMessage, TimeoutError) as error:
            yield warn("members", f"{record.name}: {one_line(error)}", "it may have left, or cannot be dialled")
            continue
        if isinstance(it, Busy):
            continue
        unlike = unlike_protocols(own, it.answer.protocols)
        if unlike:
            said = f"{record.name} has noloco-peer {it.answer.version} and speaks {unlike[1]}, this one {unlike[0]}"
            yield fail("version", said, f"install the same version (here: {__version__})")
        elif it.answer.version != __version__:
            said = f"{record.name} has noloco-peer {it.answer.version}, this one {__version__}"
            yield ok("version", f"{said}: they have the same protocols")
        else:
            yield ok("version", f"{record.name} has noloco-peer {it.answer.version} too")


def spoken() -> list[str]:
    """The stream protocols of this version."""
    own = [dialback.DIALBACK_PROTOCOL, gate.ADMISSION_PROTOCOL, relay.RELAY_PROTOCOL]
    return [*own, SPEED_PROTOCOL, REDUCE_PROTOCOL, STATE_PROTOCOL, MEET_PROTOCOL, GATHER_PROTOCOL]


def unlike_protocols(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """The first protocol with two versions, such as ``noloco/meet/1`` and ``noloco/meet/2``."""
    own = {it.rpartition("/")[0]: it for it in ours}
    for other in theirs:
        mine = own.get(other.rpartition("/")[0])
        if mine is not None and mine not in theirs:
            return mine, other
    return None
