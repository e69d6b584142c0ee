"""Who is in the swarm: the same configuration, the same protocols, nobody else with this peer's key?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from peer import __version__
from peer.commands.check.finding import Finding, fail, ok, warn
from peer.commands.check.local import identity_file
from peer.commands.check.subject import Subject
from peer.config.digest import canonical, digest, first_difference

if TYPE_CHECKING:
    from peer.p2p.admission.dht_rules import Authority
    from peer.p2p.node import Node
    from peer.swarm.directory.records import MemberRecord

JOIN_TIMEOUT = 60.0  # seconds
TWIN_TIMEOUT = 60.0
TALK_TIMEOUT = 15.0  # seconds for one member
ASKED = 3  # members


def members(node: Node, config: Subject, authority: Authority | None, answering: Sequence[str]) -> Iterator[Finding]:
    """Joins the DHT as a client; raises :class:`peer.errors.UserError` when it is not let in."""
    from peer.swarm.directory.directory import Members

    node.call(node.join(answering, client=True), JOIN_TIMEOUT)
    yield from _twin(node, config, authority)
    present = Members(node, config.run.name, _nothing).refresh_all()
    if not present:
        yield ok("swarm", f"nobody trains {config.run.name!r} there yet: this peer would begin it")
        return
    own = digest(config.run)
    same = [record for record in present if record.config == own]
    others = [record for record in present if record.config != own]
    if same:
        names = ", ".join(record.name for record in same[:ASKED])
        who = f"{len(same)} members train" if len(same) > 1 else "1 member trains"
        yield ok("swarm", f"{who} this configuration ({own}): {names}")
    if others:
        said = f"{others[0].name} trains another configuration: {_difference(node, config, others[0])}"
        yield (warn if same else fail)("config", said, "take the swarm's file; noloco-peer show-config prints this one")
    yield from _versions(node, random.sample(same, min(ASKED, len(same))))


def _nothing() -> MemberRecord:
    raise AssertionError("a check announces nothing")


def _twin(node: Node, config: Subject, authority: Authority | None) -> Iterator[Finding]:
    """Is a peer alive with the key that this one would use?"""
    from peer.p2p import identity
    from peer.swarm.directory.duplicate_identity import twin_of

    path, subkey = identity_file(config), node.subkey
    if authority is None:
        if path is None or not path.exists():
            return
        subkey = identity.load_or_create(path)
    twin = node.call(twin_of(node, config.run.name, subkey), TWIN_TIMEOUT)
    if twin is not None:
        said = f"a peer with the same identity is alive: {twin.name} at {', '.join(twin.addresses[:2])}"
        yield fail("identity", said, "each peer needs a key (peer.identity) or an invitation of its own")


def _difference(node: Node, config: Subject, record: MemberRecord) -> str:
    """The first key in which a member's run differs, as it says itself."""
    from peer.p2p.stream import BadMessage, StreamLost
    from peer.swarm.party import Decline
    from peer.swarm.state_transfer.donor import ANSWER, PROTOCOL, StateRequest

    async def ask() -> str:
        stream = await node.open(record.peer_id, PROTOCOL, record.addresses)
        try:
            request = StateRequest(run=config.run.name, config=digest(config.run), layout="")
            await stream.send(request, TALK_TIMEOUT / 2)
            answer = await stream.receive(ANSWER, TALK_TIMEOUT / 2)
            theirs = answer.run if isinstance(answer, Decline) else None
            return first_difference(canonical(config.run), theirs) if theirs else ""
        finally:
            stream.close()

    try:
        found = node.call(ask(), 2 * TALK_TIMEOUT)
    except (StreamLost, BadMessage, TimeoutError):
        found = ""
    return found or f"its digest is {record.config}, ours {digest(config.run)}"


def _versions(node: Node, records: Sequence[MemberRecord]) -> Iterator[Finding]:
    from peer.p2p.reachability.dialback import PROTOCOL, Heard, ask
    from peer.p2p.stream import BadMessage, StreamLost

    async def heard(record: MemberRecord) -> Heard | None:
        return await ask(await node.open(record.peer_id, PROTOCOL, record.addresses), [])

    own = spoken()
    for record in records:
        try:
            it = node.call(heard(record), 2 * TALK_TIMEOUT)
        except (StreamLost, BadMessage, TimeoutError) as error:
            yield warn(
                "members", f"{record.name}: {str(error) or 'no answer'}", "it may have left, or cannot be dialled"
            )
            continue
        if it is None:
            continue
        unlike = unlike_protocols(own, it.answer.protocols)
        if unlike:
            said = f"{record.name} has noloco-peer {it.answer.version} and speaks {unlike[1]}, this one {unlike[0]}"
            yield fail("version", said, f"install the same version (here: {__version__})")
        elif it.answer.version != __version__:
            said = (
                f"{record.name} has noloco-peer {it.answer.version}, this is {__version__}: they understand each other"
            )
            yield ok("version", said)
        else:
            yield ok("version", f"{record.name} has noloco-peer {it.answer.version} too")


def spoken() -> list[str]:
    """The stream protocols of this version."""
    from peer.exchange.group.streams import REDUCE_PROTOCOL
    from peer.p2p.admission import gate
    from peer.p2p.reachability import dialback, relay
    from peer.swarm.grouping import roster
    from peer.swarm.pairing import proposals
    from peer.swarm.state_transfer import donor

    return [REDUCE_PROTOCOL, *(it.PROTOCOL for it in (dialback, donor, gate, proposals, relay, roster))]


def unlike_protocols(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """The first two that are the same protocol in different versions: ``noloco/meet/1`` and ``noloco/meet/2``."""
    own = {it.rpartition("/")[0]: it for it in ours}
    for other in theirs:
        mine = own.get(other.rpartition("/")[0])
        if mine is not None and mine not in theirs:
            return mine, other
    return None
