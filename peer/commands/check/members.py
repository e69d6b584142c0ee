"""The members of the swarm: do they have the same configuration and version, does one have this peer's key?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from peer import __version__
from peer.commands.check.finding import Finding, Subject, fail, ok, warn
from peer.commands.check.local import identity_file, own_folder
from peer.commands.check.speed import lines
from peer.config.digest import digest
from peer.p2p import identity
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.greeting import OTHER_LAYOUT, MemberNode
from peer.p2p.stream import Refused
from peer.swarm.directory.duplicate_identity import DUPLICATE_TIMEOUT, duplicate_of
from peer.swarm.directory.reader import Reader
from peer.swarm.directory.records import MemberRecord
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
    present = Reader(node, config.run.name).refresh_all()
    if not present:
        yield ok("swarm", f"no peer trains {config.run.name!r} there yet: this one would be the first")
    own = digest(config.run)
    same = [record for record in present if record.config == own]
    others = [record for record in present if record.config != own]
    if same:
        names = ", ".join(record.name for record in same[:ASKED_MEMBERS])
        who = f"{len(same)} members train" if len(same) > 1 else "1 member trains"
        yield ok("swarm", f"{who} this configuration ({own}): {names}")
    if others:
        yield _misfit(node, config, others[0], warn if same else fail)
    some = random.sample(same, min(ASKED_MEMBERS, len(same)))
    yield from _versions(node, some)
    if speed:
        yield from lines(node, config, some, same)


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


def _misfit(node: MemberNode, config: Subject, record: MemberRecord, level: Callable[..., Finding]) -> Finding:
    """How a member of another digest differs, from its refusal: in its version, which may have other keys, or in the
    first key of its run.
    """
    refused = _refusal(node, record)
    if refused is not None and refused.run is None:
        return _refuses(node, record, refused, level)
    own = f"its digest is {record.config}, ours {digest(config.run)}"
    said = f"{record.name} trains another configuration: {own if refused is None else node.member.difference(refused)}"
    return level("config", said, "take the swarm's file; noloco-peer show-config prints this one")


def _versions(node: MemberNode, records: Sequence[MemberRecord]) -> Iterator[Finding]:
    """Our greeting has no layout, so a member that fits refuses it for that alone."""
    for record in records:
        refused = _refusal(node, record)
        if refused is None:
            yield warn("members", f"{record.name} does not answer", "it may have left, or cannot be dialled")
        elif str(refused) == OTHER_LAYOUT:
            yield ok("version", f"{record.name} understands this noloco-peer ({__version__})")
        else:
            yield _refuses(node, record, refused, fail)


def _refuses(node: MemberNode, record: MemberRecord, refused: Refused, level: Callable[..., Finding]) -> Finding:
    said = f"{record.name} refuses this peer: {node.member.difference(refused)}"
    return level("version", said, f"install the same version (here: {__version__})")


def _refusal(node: MemberNode, record: MemberRecord) -> Refused | None:
    return node.call(node.refused_by(record.peer_id, STATE_PROTOCOL, record.addresses), 2 * MEMBER_TIMEOUT)
