"""docker/clouds/slurm.sbatch as a job of two tasks on one host; a stand-in for srun starts the tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netlab.lab import ROOT, Lab
from tests.netlab.plan import Plan
from tests.swarm.support.harness import TINY

pytestmark = pytest.mark.needs("laboratory")
SRUN = """#!/bin/bash
# Starts the tasks of a step on this machine, and ends as srun does.
shift
tasks=()
for ((it = 0; it < SLURM_NTASKS; it++)); do SLURM_PROCID=$it "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SETS = ("run.steps=400", "run.inner_steps=8", "peer.start_patience=300", "peer.metrics.port=0")


def test_the_job_trains_a_swarm_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "FOLDER": str(tmp_path / "job"), "PATH": path}
    sets = [it for key in (*TINY, *SETS) for it in ("--set", key)]
    with Lab(Plan(network="131.77"), 1) as lab:
        words = ["bash", "docker/clouds/slurm.sbatch", "configs/demo.yaml", *sets]
        done = subprocess.run(
            lab.command(0, words),
            cwd=ROOT,
            env={**os.environ, **job},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    met = set()
    for name in ("peer-0", "peer-1"):
        rows = [json.loads(line) for line in (tmp_path / "job" / name / "rounds.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] >= 400, name
        met |= {row["partner"] for row in rows if row["outcome"] == "merged"}
    assert met == {"peer-0", "peer-1"}
    assert "/ip4/131.77." in (tmp_path / "job" / "addresses").read_text()
