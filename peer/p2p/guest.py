"""A node that only reads the swarm. Its key is temporary, or that of an invitation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.p2p import identity
from peer.p2p.admission.dht_rules import Authority, invited
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import NodeSettings
from peer.p2p.reachability.decide import Reachability

ONLOOKER = MemberIdentity("guest", run="", config="", canonical="", layout="")  # opens no stream to a member


@contextmanager
def guest_node(
    settings: NodeSettings, invitation: Path | None, owner: str | None = None, member: MemberIdentity = ONLOOKER
) -> Iterator[tuple[MemberNode, Authority | None]]:
    """A node that listens and has not joined yet, to be joined with ``client=True``; stopped whatever happens.

    ``settings.identity`` is replaced. ``invitation``: a file, where the swarm asks for one; ``owner``: the expected
    one. ``member``: what it greets members as. Raises one-line errors only.
    """
    with TemporaryDirectory(prefix="noloco-guest-") as folder:
        key = Path(folder, "guest.key")
        authority = None if invitation is None else invited(invitation, key, owner)
        identity.load_or_create(key)
        node = MemberNode(replace(settings, identity=key), authority, member)
        try:
            node.listen(Reachability(announce=settings.announce))
            yield node, authority
        finally:
            node.stop()
