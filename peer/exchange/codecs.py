"""The codec that ``run.exchange.codec`` names. The only place that picks its class."""

from __future__ import annotations

from peer.config.schema import CodecName
from peer.exchange.codec import Cast, Codec
from peer.exchange.modulo import Modulo


def codec(name: CodecName, numel: int) -> Codec:
    """For contributions of ``numel`` elements."""
    return Modulo(name, numel) if name in ("int8", "int4") else Cast(name)
