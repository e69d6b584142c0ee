"""Hostile peers among eight real processes: the refusals of the others, the reasons, and their final loss.

python -m tests.benchmarks.hostile_real [--quick] [--json FILE]

A tiny model (6,720 parameters), H 50; the attacks are those of tests/swarm/support/attacks.py. For longer runs with
several seeds see hostile.py, a simulation. Runs in FILE are not repeated.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from tests.benchmarks.common import Known, finish, options
from tests.benchmarks.hostile import SHOWN
from tests.swarm.support.attacks import CREEP
from tests.swarm.support.harness import Swarm

PROGRAM = "tests.swarm.programs.hostile_peer"
PEERS = 8
WAIT = 400.0


def battle(attack: str | None, guarded: bool, steps: int, liars: int = 1) -> dict[str, Any]:
    """Figures of the honest peers. ``liars``: so many of the eight are hostile."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        swarm = Swarm(Path(folder))
        try:
            return _battle(swarm, attack, guarded, steps, liars)
        finally:
            swarm.end()


def _battle(swarm: Swarm, attack: str | None, guarded: bool, steps: int, liars: int) -> dict[str, Any]:
    _, address = swarm.bootstrap()
    sets = (f"run.steps={steps}", "run.inner_steps=50", f"peer.start_with={PEERS}", "peer.start_patience=120")
    sets = (*sets, "run.evaluation.batches=16", "run.evaluation.every_rounds=10")
    names = [f"peer-{index}" for index in range(PEERS)]
    for name in names:
        arguments = swarm.train(name, *sets, address=address)
        more = {} if guarded else {"UNGUARDED": "yes"}
        if attack is not None and name in names[:liars]:
            more = {"HOSTILE": attack}
        arguments[1] = PROGRAM
        swarm.start(name, arguments, more)
    ruined = sum(process.exit_code(WAIT) != 0 for process in swarm.processes[1 + liars :])  # behind the bootstrap node
    rows = [row for name in names[liars:] for row in swarm.rounds(name)]
    evals = [swarm.folder / name / "evals.jsonl" for name in names[liars:]]
    losses = [json.loads(file.read_text().splitlines()[-1])["val_loss"] for file in evals]
    return {
        "val_loss": None if ruined else mean(losses),
        "ruined": ruined,  # peers that ended because their loss was not finite
        "rounds": len(rows),
        "outcomes": Counter(row["outcome"] for row in rows),
        "reasons": Counter(row["reason"] for row in rows if row["reason"]),
        "with_hostile": Counter(row["outcome"] for row in rows if row["partner"] in names[:liars]),
    }


def main() -> None:
    args = options("honest real peers with one hostile peer or two")
    steps, attacks = (1000, SHOWN[:1]) if args.quick else (3000, (*SHOWN, CREEP))
    known, found = Known("hostile_real", args), dict[str, Any]()
    for attack in (None, *attacks):
        for guarded in (True, False) if attack else (True,):
            name = f"{attack or 'honest'}{'' if guarded else ', no guard'}"
            found[name] = known.get(name, partial(battle, attack, guarded, steps))
    for attack in () if args.quick else (*SHOWN, CREEP):
        name = f"two, {attack}"
        found[name] = known.get(name, partial(battle, attack, True, steps, 2))
    words = "; ".join(f"{name} {_beside(row, found['honest'])}" for name, row in found.items())
    finish("hostile_real", found, f"validation loss against that of eight honest peers: {words}", args)


def _beside(row: dict[str, Any], honest: dict[str, Any]) -> str:
    return f"{row['ruined']} ruined" if row["ruined"] else f"{row['val_loss'] / honest['val_loss'] - 1:+.2%}"


if __name__ == "__main__":
    main()
