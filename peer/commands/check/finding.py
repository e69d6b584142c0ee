"""What is checked, and what a check has found: one line, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peer.api.config import OwnConfig
from peer.config.schema import Config

Subject = Config | OwnConfig  # of a peer, or of a program with a loop of its own
Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """``warn``: it joins, and something is not as it could be; ``fail``: it cannot join, or not as it is set."""

    level: Level
    topic: str
    text: str
    advice: str = ""

    def line(self) -> str:
        """One line for a terminal, without what a stranger may have put into it to look like another."""
        said = f"{self.text}; {self.advice}" if self.advice else self.text
        return f"{self.level:<5} {self.topic:<13} {''.join(it if it.isprintable() else ' ' for it in said)}"


def ok(topic: str, text: str) -> Finding:
    return Finding("ok", topic, text)


def warn(topic: str, text: str, advice: str) -> Finding:
    return Finding("warn", topic, text, advice)


def fail(topic: str, text: str, advice: str) -> Finding:
    return Finding("fail", topic, text, advice)
