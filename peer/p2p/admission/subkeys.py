"""The owner of a DHT record, by its subkey: ``<peer id>``, or ``<peer id>[owner:<public key>]`` in an invited swarm."""

from __future__ import annotations


def owner_of(subkey: str) -> tuple[str, str]:
    """Peer id and public key of a subkey; the key is empty in an open swarm."""
    peer_id, _, rest = subkey.partition("[owner:")
    public = rest.removesuffix("]")
    return (peer_id, public) if subkey == f"{peer_id}[owner:{public}]" else (subkey, "")
