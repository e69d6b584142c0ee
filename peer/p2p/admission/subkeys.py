"""Whose a record in the DHT is, by the subkey under which it stands."""

from __future__ import annotations


def owner_of(subkey: str) -> tuple[str, str]:
    """Peer id and public key of a subkey; the key is empty in a swarm that is open."""
    peer_id, _, rest = subkey.partition("[owner:")
    public = rest.removesuffix("]")
    return (peer_id, public) if subkey == f"{peer_id}[owner:{public}]" else (subkey, "")
