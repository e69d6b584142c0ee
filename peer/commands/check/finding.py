"""The subject of a check, and its findings: one line each, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from peer.api.config import OwnConfig
from peer.config.schema import Config
from peer.logs import printable

Subject = Config | OwnConfig  # of a peer, or of a program with its own loop


@dataclass(frozen=True)
class Finding:
    """``warn``: the peer can join, but not at its best; ``fail``: it cannot join with this configuration."""

    level: Literal["ok", "warn", "fail"]
    topic: str
    text: str
    advice: str

    def line(self) -> str:
        said = f"{self.text}; {self.advice}" if self.advice else self.text
        return f"{self.level:<5} {self.topic:<13} {printable(said)}"


ok, warn, fail = partial(Finding, "ok", advice=""), partial(Finding, "warn"), partial(Finding, "fail")
