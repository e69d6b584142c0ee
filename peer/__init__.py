"""The training peer. Reading order: trainer.py, inner.py, outer/noloco.py, exchange/pair.py, swarm/rendezvous.py.

For programs of one's own: :class:`peer.OuterLoop` (own/loop.py), :class:`peer.UserError`, :class:`peer.RunError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from peer.errors import RunError, UserError

if TYPE_CHECKING:
    from peer.api.loop import OuterLoop

__all__ = ["OuterLoop", "RunError", "UserError", "__version__"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """``OuterLoop`` brings torch and hivemind along: only for who asks for it."""
    if name != "OuterLoop":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("peer.logs").quiet_hivemind()
    return import_module("peer.api.loop").OuterLoop
