"""Seconds from the command to the first training step of the papers' 125M model (310M with embeddings), on a CPU.

python -m tests.benchmarks.startup [--quick] [--json FILE]

One real peer: ``noloco-peer train`` with NoLoCo's 125M. A step has one short sequence, so that the start
dominates and not the arithmetic of a batch. The peer is ended after its first round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from tests.benchmarks.common import finish, options

ROOT = Path(__file__).parents[2]
CONFIGS = [ROOT / "configs" / name for name in ("models/llama-125m.yaml", "methods/noloco.yaml")]
NAME = "first"
DEADLINE = 180.0  # seconds for a start
ENDING = 30.0  # seconds for the end
SETTINGS = {
    "run.batch_size": 1,
    "run.data.sequence_length": 128,
    "run.inner_steps": 1,
    "run.evaluation.batches": 1,
    "run.exchange.overlap": "false",  # the first round ends with the first step
    "peer.micro_batch": 1,
    "peer.name": NAME,
    "peer.device": "cpu",
    "peer.network.host": "127.0.0.1",
}


def start_once(folder: Path) -> dict[str, float]:
    """Seconds from one start to the end of the first inner step, in total and by phase. The processor seconds are those
    of the whole first round; they show the time on an idle machine.
    """
    program = [sys.executable, "-m", "peer", "train", "--config", *map(str, CONFIGS)]
    program += ["--set", f"run.dir={folder}"]
    program += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    began = time.monotonic()
    with (folder / "out.txt").open("wb") as out:
        peer = subprocess.Popen(program, cwd=ROOT, stdout=out, stderr=out)
    try:
        phases = _first_round(peer, folder, began + DEADLINE)
        whole = time.monotonic() - began
        used = psutil.Process(peer.pid).cpu_times()
    finally:
        _end(peer)
    step = whole - sum(phases[key] for key in ("match", "exchange", "apply", "checkpoint"))
    early = {key: phases[key] for key in ("join", "eval", "inner")}
    before = step - sum(early.values())
    return {"to_first_step": step, "cpu_seconds": used.user + used.system, "imports_text_weights": before, **early}


def _first_round(peer: subprocess.Popen[bytes], folder: Path, until: float) -> dict[str, float]:
    """Wait for the first round; its seconds by phase."""
    rounds = folder / NAME / "rounds.jsonl"
    while not (rounds.exists() and rounds.read_text(encoding="utf-8").endswith("\n")):
        if peer.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"no first step: {(folder / 'out.txt').read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.02)
    phases: dict[str, float] = json.loads(rounds.read_text(encoding="utf-8").splitlines()[0])["seconds"]
    return phases


def _end(peer: subprocess.Popen[bytes]) -> None:
    """End it at once, without the checkpoint of 6 GB that the first signal asks for."""
    for _ in range(2):
        if peer.poll() is None:
            os.kill(peer.pid, signal.SIGINT)
            time.sleep(0.5)
    try:
        peer.wait(ENDING)
    except subprocess.TimeoutExpired:
        peer.kill()
        peer.wait(ENDING)


def main() -> None:
    args = options("seconds from the command to the first training step of a 125M model on a CPU")
    runs = []
    for _ in range(1 if args.quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(start_once(Path(folder)))
        print(" ".join(f"{key} {value:.1f}" for key, value in runs[-1].items()), flush=True)
    middle = {key: median(run[key] for run in runs) for key in runs[0]}
    words = (
        f"first step after {middle['to_first_step']:.1f} s ({middle['cpu_seconds']:.1f} s of processors): "
        f"{middle['imports_text_weights']:.1f} imports, text and weights, {middle['join']:.1f} joining, "
        f"{middle['eval']:.1f} evaluation, {middle['inner']:.1f} the step itself"
    )
    finish("startup", {"seconds": middle, "runs": runs}, words, args)


if __name__ == "__main__":
    main()
