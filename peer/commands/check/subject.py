"""What is checked: the configuration of a peer, or that of a program with a loop of its own."""

from __future__ import annotations

from peer.api.config import OwnConfig
from peer.config.schema import Config

Subject = Config | OwnConfig
