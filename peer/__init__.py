"""The training peer. README.md in this folder describes the packages and says in which order to read them.

For other programs: :class:`peer.OuterLoop` (api/loop.py), :class:`peer.Round` (api/account.py),
:class:`peer.UserError`, :class:`peer.RunError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from peer.errors import RunError, UserError

if TYPE_CHECKING:
    from peer.api.account import Round
    from peer.api.loop import OuterLoop

__all__ = ["OuterLoop", "Round", "RunError", "UserError", "__version__"]

__version__ = "0.2.0"
LOADED_ON_USE = {"OuterLoop": "peer.api.loop", "Round": "peer.api.account"}  # they import torch and hivemind


def __getattr__(name: str) -> Any:
    if name not in LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("peer.logs").quiet_hivemind()
    return getattr(import_module(LOADED_ON_USE[name]), name)
