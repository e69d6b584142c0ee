"""What is checked: the configuration of a peer, or that of a program with a loop of its own."""

from __future__ import annotations

from peer.config.schema import Config
from peer.own.config import OwnConfig

Subject = Config | OwnConfig
