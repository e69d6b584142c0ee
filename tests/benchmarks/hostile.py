"""One hostile peer in eight: the loss of the other seven with the guard (peer/exchange/guard.py) and without it.

python -m tests.benchmarks.hostile [--quick] [--json FILE]

Every run is a simulation with the peer's own inner loop, outer step, codec, guard and backoff. Only the bytes that
replica 0 sends are false (tests/swarm/support/attacks.py). The figures are validation losses of replicas 1 to 7.
hostile_real.py does the same with real peers. Runs in FILE's .runs.json are not repeated.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.replica import Replica
from peer.commands.simulate.simulation import Simulation
from peer.errors import RunError
from peer.rounds.types import Outcome
from tests.benchmarks.common import finish, options
from tests.benchmarks.convergence.cases import NOLOCO, SWEEP_STEPS, Case
from tests.swarm.support.attacks import Attack, Hostile, Unguarded

SHOWN = (Attack.SIGN, Attack.SCALE, Attack.RANDOM, Attack.STALE)
SEEDS = (0, 1)


@dataclass(frozen=True)
class Battle:
    """One simulation."""

    attack: Attack | None
    guarded: bool
    steps: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.attack or 'honest'} {'guarded' if self.guarded else 'open'} steps={self.steps} seed={self.seed}"


class _Simulation(Simulation):
    battle: Battle

    def _replicas(self) -> list[Replica]:
        replicas = super()._replicas()
        if self.battle.attack is not None:
            replicas[0].codec = Hostile(self.battle.attack)
        for replica in replicas:
            if not self.battle.guarded:
                replica.guard = Unguarded()
        return replicas


def run_one(battle: Battle) -> dict[str, Any]:
    """One simulation, in a separate process."""
    case = Case("hostile", "noloco", outer=NOLOCO, steps=battle.steps, seed=battle.seed)
    simulation = _Simulation(case.config(), Options(replicas=case.replicas, method=Method.NOLOCO))
    simulation.battle = battle
    try:
        peers = simulation.run(lambda line: None)["peers"]
    except RunError as error:  # a diverged model is a result
        return {"key": battle.key, "val_loss": None, "end": str(error)}
    honest = [peers[f"replica-{index}"] for index in range(1, case.replicas)]
    rounds = {it.value: sum(row["rounds"][it] for row in honest) for it in Outcome}
    merged_with_it = sum(row["partners"].get("replica-0", 0) for row in honest)
    loss = mean(row["val_loss"] for row in honest)
    return {"key": battle.key, "val_loss": loss, "rounds": rounds, "merged_with_hostile": merged_with_it}


def run_all(battles: list[Battle], file: Path | None) -> dict[str, dict[str, Any]]:
    """Rows by key."""
    rows = {row["key"]: row for row in json.loads(file.read_text())} if file and file.exists() else {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(run_one, it) for it in battles if it.key not in rows]):
            row = future.result()
            rows[row["key"]] = row
            print(row, flush=True)
            if file is not None:
                file.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    return rows


def figures(rows: dict[str, dict[str, Any]], steps: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Loss ratios between runs with the same seed, mean over the seeds; ``None`` if a model diverged."""

    def loss(attack: Attack | None, guarded: bool, seed: int) -> float | None:
        value: float | None = rows[Battle(attack, guarded, steps, seed).key]["val_loss"]
        return value

    def ratio(attack: Attack | None, guarded: bool) -> float | None:
        pairs = [(loss(attack, guarded, seed), loss(None, False, seed)) for seed in seeds]
        known = [one / two for one, two in pairs if one is not None and two is not None]
        return mean(known) if len(known) == len(seeds) else None

    return {
        "honest_ratio": ratio(None, True),
        "attacked_ratio": {it.value: ratio(it, True) for it in SHOWN},
        "unguarded_ratio": {it.value: ratio(it, False) for it in SHOWN},
        "rows": list(rows.values()),
    }


def in_words(found: dict[str, Any]) -> str:
    def percent(ratio: float | None) -> str:
        return "ruined" if ratio is None else f"{ratio - 1:+.2%}"

    attacks = "; ".join(
        f"{name} {percent(found['attacked_ratio'][name])} ({percent(found['unguarded_ratio'][name])})"
        for name in found["attacked_ratio"]
    )
    honest = percent(found["honest_ratio"])
    return f"loss with one hostile peer in eight, guarded (not guarded): {attacks}; no hostile peer {honest}"


def main() -> None:
    args = options("the effect of a hostile peer on the other peers' loss")
    steps, seeds = (60, (0,)) if args.quick else (SWEEP_STEPS, SEEDS)
    battles = [
        Battle(attack, guarded, steps, seed) for seed in seeds for attack in (None, *SHOWN) for guarded in (False, True)
    ]
    rows = run_all(battles, args.json.with_suffix(".runs.json") if args.json else None)
    found = figures(rows, steps, seeds)
    finish("hostile", found, in_words(found), args.json)


if __name__ == "__main__":
    main()
