"""Shared by all benchmarks: their two options, and the JSON with commit and command."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def options(description: str) -> argparse.Namespace:
    return command_line(description).parse_args()


def command_line(description: str) -> argparse.ArgumentParser:
    """``--quick`` runs the same code with less work: at most four minutes on two cores."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less work, the same code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def finish(name: str, figures: dict[str, Any], words: str, file: Path | None) -> None:
    """Write the JSON and print ``words`` as the last line."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**figures, "made_by": made_by(name)}, indent=1) + "\n", encoding="utf-8")
    print(words)


def made_by(name: str, **settings: Any) -> dict[str, Any]:
    """What made a result: command, commit, day, versions and ``settings``."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": f"python -m tests.benchmarks.{name} {' '.join(sys.argv[1:])}".strip(),
        "commit": head.stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **settings,
    }


class Known:
    """Finished measurements, kept in ``.runs.json`` next to the figures (``None``: nowhere)."""

    def __init__(self, json_file: Path | None) -> None:
        self._file = file = json_file.with_suffix(".runs.json") if json_file else None
        self.found: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}

    def save(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def get(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The known result, or that of ``measure``."""
        if name not in self.found:
            self.found[name] = measure()
            print(f"{name}: {self.found[name]}", flush=True)
            self.save()
        return self.found[name]
