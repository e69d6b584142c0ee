"""What a node is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peer.config.schema import NetworkConfig


@dataclass(frozen=True)
class NodeSettings:
    """How a node listens and which nodes it joins. ``host``: an IPv4 address; ``reach``: as in ``peer.network``."""

    identity: Path | None
    host: str
    port: int
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    upnp: bool = False
    reach: Literal["auto", "public", "relay"] = "public"
    bulk_port: int | Literal["auto", "off"] = "off"
    max_upload: str | None = None
    max_download: str | None = None
    start_timeout: float = 60.0
    join_timeout: float = 60.0

    @classmethod
    def of(cls, network: NetworkConfig, identity: Path | None, initial_peers: tuple[str, ...] = ()) -> NodeSettings:
        """The settings in ``peer.network``, whose fields are the other fields of this class."""
        return cls(identity=identity, initial_peers=initial_peers, **dict(network))
