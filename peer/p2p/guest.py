"""A node that only looks: its key is thrown away afterwards, or is that of an invitation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.p2p import identity
from peer.p2p.admission.dht_rules import Authority, invited
from peer.p2p.node import Node, NodeSettings
from peer.p2p.reachability.decide import Reachability


@contextmanager
def guest_node(
    settings: NodeSettings, invitation: Path | None, owner: str | None = None
) -> Iterator[tuple[Node, Authority | None]]:
    """A node that listens and has not joined yet, to be joined with ``client=True``; stopped whatever happens.

    ``settings.identity`` is replaced. ``invitation``: a file, where the swarm asks for one; ``owner``: by whom.
    Raises one-line errors only.
    """
    with TemporaryDirectory(prefix="noloco-guest-") as folder:
        key = Path(folder, "guest.key")
        authority = None if invitation is None else invited(invitation, key, owner)
        identity.load_or_create(key)
        node = Node(replace(settings, identity=key), authority)
        try:
            node.listen(Reachability(announce=settings.announce))
            yield node, authority
        finally:
            node.stop()
