"""A peer trains while its checkpoints go to a hub, and leaves when its last weights are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.swarm.support.harness import ROOT, TINY
from tests.unit.hub.server import OTHER, WRITE, Hub, serving

SETS = (
    "run.steps=240",
    "run.inner_steps=4",
    "run.outer={name: local}",
    "peer.network.host=127.0.0.1",
)
PUSH = ("peer.push.to=me/demo", "peer.push.every_rounds=10", "peer.checkpoint.every_rounds=10")


def run(hub: Hub, token: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = [it for key in (*TINY, *SETS, *PUSH, f"run.dir={folder}") for it in ("--set", key)]
    return subprocess.run(
        [sys.executable, "-m", "peer", *command, "--config", "configs/demo.yaml", *words],
        cwd=ROOT,
        env={**os.environ, **hub.environment(token, folder / "hf"), "NOLOCO_PEER_NAME": "alice"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("token", [WRITE, OTHER])
def test_training_ends_the_same_whether_it_may_push_or_not(token: str, tmp_path: Path) -> None:
    with serving() as hub:
        done = run(hub, token, tmp_path, "train")
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "alice" / "rounds.jsonl").read_text().splitlines()) == 60
        assert token not in done.stderr and not (tmp_path / "alice" / "push").exists()
        kept = [it for it in (tmp_path / "alice").rglob("*") if it.is_file() and token.encode() in it.read_bytes()]
        assert not kept
        if token == OTHER:
            assert not hub.repositories
            assert "pushes will fail, training goes on: me/demo: me is neither other nor" in done.stderr
            assert "step 240 is not pushed: me/demo: me is neither other" in done.stderr
            return
        made = hub.repositories["me/demo"]
        assert made.private and made.commits[-1] == "demo, step 240", done.stderr
        assert made.commits == sorted(set(made.commits), key=made.commits.index)
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= made.files.keys()
        last = "pushes every 10 rounds: me/demo: not there yet, it will be made, private"
        assert last in done.stderr and done.stderr.count(" pushed: step=") == len(made.commits)


def test_one_peer_of_a_swarm_on_one_machine_pushes(tmp_path: Path) -> None:
    with serving() as hub:
        done = run(hub, WRITE, tmp_path, "swarm", "--peers", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        logs = [(tmp_path / f"peer-{number}" / "peer.log").read_text() for number in (0, 1)]
        assert ["pushes every 10 rounds" in log for log in logs] == [True, False]
        assert len(hub.repositories["me/demo"].commits) == logs[0].count(" pushed: step=")
