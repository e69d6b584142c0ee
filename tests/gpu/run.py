"""Runs the checks one after the other, prints a line for each finding and keeps the figures."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from peer import logs
from tests import commit as current
from tests.gpu.site import Finding, Site

# What is right comes before what is fast: the time may not suffice on a slow card.
CHECKS = (
    *("copies", "sharing", "resume", "offload", "out_of_memory", "memory"),
    *("ranks", "step_share", "network", "speed"),
)
LIMIT = 14 * 60.0  # seconds, unless --limit says another one; a finding takes up to a minute more
PACKAGES = ("transformers", "hivemind", "numpy", "pydantic", "triton")


def findings(site: Site, only: Sequence[str] | None = None, limit: float = LIMIT) -> Iterator[Finding]:
    """Of all checks, or of those named. What breaks a check, or is not reached in time, is a finding too."""
    ends = time.monotonic() + limit
    for name in only or CHECKS:
        for finding in _of_check(name, site, ends, limit):
            yield replace(finding, check=name)
        site.free()


def _of_check(name: str, site: Site, ends: float, limit: float) -> Iterator[Finding]:
    if time.monotonic() > ends:
        yield Finding(name, False, f"not begun within {limit:.0f} s", reached=False)
        return
    try:
        for finding in importlib.import_module(f"tests.gpu.checks.{name}").check(site):
            yield finding
            if time.monotonic() > ends:
                yield Finding(name, False, f"not finished within {limit:.0f} s")
                return
    except Exception as error:  # noqa: BLE001 - the other checks still say something
        traceback.print_exc()
        said = (str(error).strip().splitlines() or [""])[0][:200]
        yield Finding(name, False, f"{type(error).__name__}: {said}")


def on_accelerator(
    folder: Path, only: Sequence[str] | None, json_file: Path | None, commit: str, limit: float = LIMIT
) -> int:
    """The exit code. The figures go to ``json_file``, with each finding: whoever lends the machine may end this at any
    moment.
    """
    logs.quiet_libraries()
    device = torch.device("cuda", torch.cuda.current_device())
    site, began = Site(torch.device(device.type), folder, timed=True), time.monotonic()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Python {platform.python_version()}")
    found = []
    for finding in findings(site, only, limit):
        print(f"{time.monotonic() - began:4.0f} s  {finding.line()}", flush=True)
        found.append(finding)
        if json_file is not None:
            write(json_file, found, commit)
    return verdict(found, time.monotonic() - began)


def verdict(found: Sequence[Finding], seconds: float) -> int:
    """Print the count; the exit code."""
    right, wrong, left_out = (sum(it.right is value for it in found) for value in (True, False, None))
    print(f"gpu-test: {right} right, {wrong} wrong, {left_out} left out, in {seconds:.0f} s")
    return 1 if wrong or not right else 0


def write(json_file: Path, found: Sequence[Finding], commit: str) -> None:
    """What the file says of checks that were not reached stays, with its commit, if it is of this machine."""
    maker, checks, found = made_by(commit), dict[str, Any](), [it for it in found if it.reached]
    if json_file.exists():
        kept = json.loads(json_file.read_text(encoding="utf-8"))
        same = all(kept["made_by"][key] == maker[key] for key in ("devices", "torch", "python"))
        checks = {name: it for name, it in kept["checks"].items() if same and not any(name == f.check for f in found)}
    for it in found:
        row = checks.setdefault(it.check, {"commit": maker["commit"], "findings": {}})
        row["findings"][it.subject] = {"right": it.right, "words": it.words, **it.figures}
    in_order = {name: checks[name] for name in CHECKS if name in checks}
    figures = {"checks": in_order, "made_by": maker}
    half = json_file.with_name(f".{json_file.name}.tmp")  # an end by force leaves no half file
    half.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    half.replace(json_file)


def made_by(commit: str) -> dict[str, Any]:
    """Device, versions and commit."""
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(it) for it in range(count)]
    return {
        "command": f"python -m tests.gpu {' '.join(sys.argv[1:])}".strip(),
        "commit": commit or current.commit(),
        "devices": [f"{it.name}, {it.total_memory / 2**30:.1f} GiB" for it in cards],
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
