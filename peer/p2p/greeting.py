"""The greeting of two members: do both train the same run, with the same configuration and model layout?

    caller: Greeting, its first message     called: reads it, then listens | Refusal, and closes

The caller does not wait for an answer, so no round trip is added; a refusal is raised where it reads the first answer.
It compares the wire versions. Names of protocols have none: a stream of another name does not open, and says no reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from peer import __version__
from peer.config.digest import first_difference
from peer.logs import get_logger
from peer.p2p.addresses import is_loopback
from peer.p2p.admission.dht_rules import Authority, invited
from peer.p2p.admission.invitation import unless_empty
from peer.p2p.daemon import folder_prefix
from peer.p2p.node import Handler, Node
from peer.p2p.reachability.decide import Reachability
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Message, Refusal, Refused, Stream, StreamLost

log = get_logger("greeting")

# of all messages after a greeting; raised with every change of one. A changed message of a protocol without a greeting
# (admission, dialback, relay, speed, ended) gets a new name
WIRE_VERSION = 7
OTHER_LAYOUT = "its model has another layout"
WARNED_PEERS = 1000

Short = Annotated[str, Field(max_length=64)]
Version = Annotated[str, Field(max_length=24, pattern=r"^[ -~]*$")]  # a part of one line


class Greeting(Message):
    """The caller's first message. A later version may have more fields: they are ignored, the versions are compared."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    kind: Literal["greeting"] = "greeting"
    wire: Annotated[int, Field(ge=0, le=2**31)]
    version: Version  # of the program
    run: Short
    config: Short  # digest of the run's configuration
    layout: Short  # digest of the model's parameter names and shapes


@dataclass(frozen=True)
class MemberIdentity:
    """What other members know of this peer. ``canonical``: the run's configuration; ``config``, ``layout``: digests."""

    name: str
    run: str
    config: str
    canonical: str
    layout: str
    _warned: set[str] = field(default_factory=set)

    @property
    def greeting(self) -> Greeting:
        return Greeting(wire=WIRE_VERSION, version=__version__, run=self.run, config=self.config, layout=self.layout)

    async def admit(self, stream: Stream) -> None:
        """The called side: read the greeting. Raises :class:`StreamLost` after the refusal of another run's member."""
        refusal = self.refusal(await stream.receive(Greeting, MESSAGE_TIMEOUT))
        if refusal is None:
            return
        await stream.send_last(refusal, MESSAGE_TIMEOUT)
        raise StreamLost(f"refused: {refusal.reason}")

    def refusal(self, theirs: Greeting) -> Refusal | None:
        """The answer to a caller that trains another run, configuration or layout; ``None`` when all are equal."""
        if theirs.wire != WIRE_VERSION:
            here = f"noloco-peer {__version__} (wire version {WIRE_VERSION})"
            return Refusal(
                reason=f"it runs {here}, this peer {theirs.version} (wire version {theirs.wire}): update the older one"
            )
        if theirs.run != self.run:
            return Refusal(reason="it trains another run")
        if theirs.config != self.config:
            return Refusal(reason="it trains another configuration", run=self.canonical)
        return Refusal(reason=OTHER_LAYOUT) if theirs.layout != self.layout else None

    def difference(self, refused: Refused) -> str:
        """The first key in which the refusing member's configuration differs, or its other reason."""
        return str(refused) if refused.run is None else first_difference(self.canonical, refused.run)

    def warn_of(self, name: str, refused: Refused) -> None:
        """Log once for each peer why it refuses this one."""
        if name not in self._warned and len(self._warned) < WARNED_PEERS:
            self._warned.add(name)
            what = "refuses this peer" if refused.run is None else "trains another configuration"
            log.warning("peer %s %s: %s", name, what, self.difference(refused))


class MemberNode(Node):
    """A node whose streams to and from other members begin with a greeting."""

    def __init__(self, settings: NodeSettings, authority: Authority | None, member: MemberIdentity) -> None:
        super().__init__(settings, authority)
        self.member = member

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        """As :meth:`open`; the greeting was sent when this returns."""
        return await _greeted(self, self.member.greeting, peer_id, protocol, addresses)

    async def refused_by(self, peer_id: str, protocol: str, addresses: Sequence[str]) -> Refused | None:
        """As :func:`refusal_of`, of this member's own greeting."""
        return await refusal_of(self, self.member.greeting, peer_id, protocol, addresses)

    async def serve_members(self, protocol: str, handler: Handler) -> None:
        """As :meth:`serve`: ``handler`` gets the streams of members of the same run."""

        async def admitted(stream: Stream) -> None:
            await self.member.admit(stream)
            await handler(stream)

        await self.serve(protocol, admitted)


async def _greeted(node: Node, greeting: Greeting, peer_id: str, protocol: str, addresses: Sequence[str]) -> Stream:
    stream = await node.open(peer_id, protocol, addresses)
    try:
        await stream.send(greeting, MESSAGE_TIMEOUT)
    except BaseException:  # also when the caller is cancelled: nobody else knows this stream yet
        stream.close()
        raise
    return stream


async def refusal_of(
    node: Node, greeting: Greeting, peer_id: str, protocol: str, addresses: Sequence[str]
) -> Refused | None:
    """How a member refuses ``greeting``; ``None`` when it does not within a deadline, or cannot be reached."""
    try:
        with closing(await _greeted(node, greeting, peer_id, protocol, addresses)) as stream:
            return Refused(await stream.receive(Refusal, MESSAGE_TIMEOUT))
    except (StreamLost, BadMessage, TimeoutError):
        return None


def newcomer(run: str) -> Greeting:
    """The greeting of a node without a configuration: each member of ``run`` refuses it with its own."""
    return MemberIdentity("newcomer", run, config="", canonical="", layout="").greeting


def guest_settings(initial_peers: Sequence[str], join_timeout: float) -> NodeSettings:
    """For a :func:`guest_node`; it listens on loopback where all of ``initial_peers`` are there."""
    host = "127.0.0.1" if all(map(is_loopback, initial_peers)) else "0.0.0.0"
    return NodeSettings(None, host, 0, initial_peers=tuple(initial_peers), join_timeout=join_timeout)


@contextmanager
def guest_node(
    settings: NodeSettings, invitation: Path | None, owner: str | None = None, member: MemberIdentity | None = None
) -> Iterator[tuple[MemberNode, Authority | None]]:
    """A node that only reads the swarm, with the key of its ``invitation`` (a file) or a temporary one. It listens; the
    caller joins with ``client=True``. It is stopped at the end.

    ``settings.identity`` is replaced. ``owner``: the expected one; without it an empty ``invitation`` is none.
    ``member``: how it greets members, if it does. Raises one-line errors only.
    """
    with TemporaryDirectory(prefix=f"{folder_prefix()}guest-") as folder:
        key = Path(folder, "guest.key")
        given = unless_empty(invitation) if owner is None else invitation
        authority = None if given is None else invited(given, key, owner)
        me = member or MemberIdentity("guest", run="", config="", canonical="", layout="")
        node = MemberNode(replace(settings, identity=key), authority, me)
        try:
            node.listen(Reachability(announce=settings.announce))
            yield node, authority
        finally:
            node.stop()
