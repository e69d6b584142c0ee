"""Which commit runs, for the figures that are kept."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def commit() -> str:
    """The commit at the first call; with ``+`` where tracked files were changed since, ``unknown`` without git."""
    head = _git("rev-parse", "--short=7", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain", "--untracked-files=no") else head or "unknown"


def _git(*arguments: str) -> str:
    """Without the index' lock: who interrupts a benchmark would leave it behind, and could commit nothing more."""
    try:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
