"""A device without memory ends a peer with one line that says what to lower, and exit code 1."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from tests.gpu.site import DEMO, ROOT, Finding, Site

LIMIT = 512 * 2**20  # bytes
SECONDS = 240  # for a process
REMEDIES = r"lower peer\.micro_batch \(now (the whole batch|4)\), or set peer\.offload: optimizer"
LINE = re.compile(rf"error: CUDA out of memory.*; {REMEDIES}")


def check(site: Site) -> Iterator[Finding]:
    for subject, overrides in (
        ("out of memory", ()),
        ("out of memory, compiled", ("peer.compile=true", "peer.micro_batch=4")),
    ):
        large = ("run.batch_size=512", "run.model.vocabulary=32000") if site.accelerator else ()
        local = (f"run.dir={site.folder / 'starved'}", "peer.network.host=127.0.0.1", "peer.metrics.port=0")
        sets = [word for it in (*site.small, *large, *local, *overrides) for word in ("--set", it)]
        arguments = ["train", "--config", str(DEMO), *sets]
        program = [sys.executable, "-m", "tests.gpu.programs.starved", str(LIMIT), *arguments]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        yield judged(subject, done.returncode, done.stderr)


def judged(subject: str, code: int, output: str) -> Finding:
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    right = code == 1 and len(errors) == 1 and bool(LINE.fullmatch(errors[0])) and "Traceback" not in output
    last = errors[-1] if errors else (output.strip().splitlines() or ["no output"])[-1]
    return Finding(subject, right, last if right else f"exit code {code}: {last}")
