"""Hostile peers among eight: the loss of the others with guard and rollback (peer/exchange/guard.py,
peer/training/boundaries/rollback.py), and without both.

python -m tests.benchmarks.hostile [--quick] [--known] [--search N] [--json FILE]

Every run is a simulation with the peer's own inner loop, outer step, codec, guard and backoff. Only the bytes or the
tokens that replica 0 sends are false (tests/swarm/support/attacks.py); of two hostile ones, those of replica 1 too.
They collude: both send the same direction, by the gradient of replica 0. "creep" is a slow poison: each round it goes
as far uphill as a merge may harm without being taken back. The figures are validation losses of the others, of two
seeds; of one without guard and rollback. ``--search`` looks for the worst of N random mixtures of s, βΔ and noise, with
a tiny model. Runs in FILE's .runs.json are not repeated; ``--known`` makes no others.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.replica import Replica
from peer.commands.simulate.simulation import Simulation
from peer.config.schema import LlamaModel
from peer.errors import RunError
from peer.rounds.types import Outcome
from tests.benchmarks.common import Known, command_line, finish, parse
from tests.benchmarks.convergence.cases import NOLOCO, SWEEP_STEPS, Case, Size
from tests.swarm.support.attacks import (
    CREEP,
    Attack,
    Falsehood,
    Hostile,
    Unguarded,
    creeping,
    gradient,
    mixture,
    uphill,
)

SHOWN = (Attack.SIGN, Attack.SCALE, Attack.RANDOM, Attack.STALE)
TOKENS, UPHILL = "tokens", "uphill"  # honest, with 2^53 tokens · s + so many ‖βΔ‖ along the gradient of the loss
SUBTLE = (
    Attack.LOUD,
    Attack.NOISY,
    Attack.DROWNED,
    Attack.POISON,
    TOKENS,
    f"{UPHILL} 0.5",
    f"{UPHILL} 3",
    f"{UPHILL} 20",
    CREEP,
)
OVERLAPPED = (f"{UPHILL} 3", f"{UPHILL} 20", CREEP)  # also with swaps that are not waited for
SWAP_STEPS = 8  # inner steps during such a swap
SEEDS = (0, 1)
TINY = Size("tiny", LlamaModel(hidden_size=48, intermediate_size=128, layers=1, heads=4), 32)
TINY_STEPS, TINY_H, TINY_RATE = 325, 25, 6e-3


@dataclass(frozen=True)
class Battle:
    """One simulation. ``attack``: an :class:`Attack`, ``TOKENS``, ``CREEP``, ``UPHILL`` with a length, or three
    factors: of s, βΔ and noise.
    """

    attack: str | None
    guarded: bool
    steps: int
    seed: int
    liars: int = 1
    tiny: bool = False
    overlap: bool = False

    @property
    def key(self) -> str:
        more = f"{' colluding' if self.liars > 1 else ''}{' tiny' if self.tiny else ''}{' overlap' * self.overlap}"
        guard = "clipped" if self.guarded else "open"
        return f"{self.attack or 'honest'} {guard} steps={self.steps} seed={self.seed}{more}"

    @property
    def case(self) -> Case:
        if self.tiny:
            return Case(
                "hostile", "noloco", TINY_H, TINY_RATE, outer=NOLOCO, steps=self.steps, seed=self.seed, size=TINY
            )
        overlap = SWAP_STEPS * self.overlap
        return Case("hostile", "noloco", outer=NOLOCO, steps=self.steps, seed=self.seed, overlap=overlap)


class Boaster(Replica):
    """A replica that claims tokens that it has not trained."""

    @property
    def tokens(self) -> int:
        return 2**53


class _Simulation(Simulation):
    battle: Battle

    def _replicas(self) -> list[Replica]:
        replicas = super()._replicas()
        hostile = replicas[: self.battle.liars] if self.battle.attack else []
        for replica in hostile:
            if self.battle.attack == TOKENS:
                replica.__class__ = Boaster
            else:
                replica.codec = Hostile(_false(self.battle.attack or "", hostile[0]))
        for replica in replicas:
            if not self.battle.guarded:
                replica.guard = Unguarded()
                replica.try_merge = lambda corrections, partner="": None  # type: ignore[method-assign]
        return replicas


def _false(attack: str, replica: Replica) -> Attack | Falsehood:
    """``replica``: the one whose model decides."""
    if attack == CREEP:
        return creeping(replica.state)
    if attack.startswith(UPHILL):
        return uphill(partial(gradient, replica.state), float(attack.removeprefix(UPHILL)))
    return Attack(attack) if attack in list(Attack) else mixture(*map(float, attack.split(",")))


def run_one(battle: Battle) -> dict[str, Any]:
    """One simulation, in a separate process."""
    case = battle.case
    options = Options(replicas=case.replicas, method=Method.NOLOCO, swap_steps=max(1, case.overlap))
    simulation = _Simulation(case.config(), options)
    simulation.battle = battle
    try:
        peers = simulation.run(lambda line: None)["peers"]
    except RunError as error:  # a diverged model is a result
        return {"val_loss": None, "end": str(error)}
    honest = [peers[f"replica-{index}"] for index in range(battle.liars, case.replicas)]
    rounds = {it.value: sum(row["rounds"][it] for row in honest) for it in Outcome}
    merged_with_it = sum(row["partners"].get("replica-0", 0) for row in honest)
    loss = mean(row["val_loss"] for row in honest)
    return {"val_loss": loss, "rounds": rounds, "merged_with_hostile": merged_with_it}


def run_all(battles: list[Battle], known: Known) -> dict[str, dict[str, Any]]:
    """Rows by key; those that are known are not repeated."""
    known.run_all(run_one, {it.key: it for it in battles})
    return known.found


def figures(rows: dict[str, dict[str, Any]], steps: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Loss ratios between runs with the same seed, mean over the seeds that were run; ``None`` if a model diverged. An
    attack without a run is left out.
    """

    def ratios(attacks: tuple[str, ...], guarded: bool, liars: int = 1, overlap: bool = False) -> dict[str, Any]:
        found = {}
        for attack in attacks:
            battles = [Battle(attack or None, guarded, steps, seed, liars, overlap=overlap) for seed in seeds]
            pairs = [(it.key, Battle(None, overlap, steps, it.seed, overlap=overlap).key) for it in battles]
            losses = [[rows[key]["val_loss"] for key in both] for both in pairs if set(both) <= set(rows)]
            known = [one / two for one, two in losses if one is not None and two is not None]
            if losses:
                found[str(attack)] = mean(known) if len(known) == len(losses) else None
        return found

    honest = ratios(("",), True)
    return {
        **({"honest_ratio": honest[""]} if honest else {}),
        "attacked_ratio": ratios((*SHOWN, *SUBTLE), True),
        "overlapped_ratio": ratios(OVERLAPPED, True, overlap=True),
        "two_attack_ratio": ratios(SUBTLE, True, 2),
        "unguarded_ratio": ratios((*SHOWN, *SUBTLE), False),
        "rows": list(rows.values()),
    }


def in_words(found: dict[str, Any]) -> str:
    def percent(ratio: float | None) -> str:
        return "ruined" if ratio is None else f"{ratio - 1:+.2%}"

    def listed(ratios: dict[str, float | None]) -> str:
        return ", ".join(f"{name} {percent(ratio)}" for name, ratio in ratios.items()) or "not run"

    return (
        f"loss with one hostile peer in eight: {listed(found['attacked_ratio'])}; without guard and rollback: "
        f"{listed(found['unguarded_ratio'])}; not waited for: {listed(found['overlapped_ratio'])}; with two that "
        f"collude: {listed(found['two_attack_ratio'])}; no hostile peer "
        f"{percent(found['honest_ratio']) if 'honest_ratio' in found else 'not run'}"
    )


def search(count: int, known: Known) -> dict[str, Any]:
    """The worst of ``count`` random mixtures, by the mean loss of the others against that of honest runs."""
    drawn = random.Random(0)
    mixtures = [
        f"{drawn.choice((-1, 1)) * drawn.uniform(0.1, 2):.3f},{drawn.uniform(-10, 10):.3f},{drawn.uniform(0, 1):.3f}"
        for _ in range(count)
    ]
    battles = [Battle(attack, True, TINY_STEPS, 0, tiny=True) for attack in (None, *mixtures)]
    rows = run_all(battles, known)
    honest = rows[battles[0].key]["val_loss"]
    ratios = {str(it.attack): (rows[it.key]["val_loss"] or float("inf")) / honest for it in battles[1:]}
    worst = max(ratios, key=lambda it: ratios[it])
    return {"worst": worst, "worst_ratio": ratios[worst], "ratios": ratios}


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--known", action="store_true", help="only the runs that FILE has")
    parser.add_argument("--search", type=int, default=0, metavar="N")
    args = parse(parser)
    known = Known("hostile", args)
    if args.search:
        worst = search(args.search, known)
        words = (
            f"the worst of {args.search} mixtures of s, βΔ and noise, {worst['worst']}: {worst['worst_ratio'] - 1:+.2%}"
        )
        finish("hostile_search", worst, words, args)
        return
    steps, seeds = (60, (0,)) if args.quick else (SWEEP_STEPS, SEEDS)
    attacks = (None, *SHOWN, *SUBTLE)
    battles = [Battle(attack, True, steps, seed) for seed in seeds for attack in attacks]
    battles += [Battle(attack, False, steps, seeds[0]) for attack in attacks]
    battles += [Battle(None, False, steps, seed) for seed in seeds[1:]]
    battles += [Battle(attack, True, steps, seed, 2) for seed in seeds for attack in SUBTLE]
    battles += [Battle(it, True, steps, seed, overlap=True) for seed in seeds for it in (None, *OVERLAPPED)]
    found = figures(known.found if args.known else run_all(battles, known), steps, seeds)
    ratios = [*found["attacked_ratio"].values(), *found["overlapped_ratio"].values()]
    goals = {
        "nothing false costs at most 0.2%": (found.get("honest_ratio") or math.inf) <= 1.002,
        "one of eight costs at most 5%": all((ratio or math.inf) <= 1.05 for ratio in ratios),
    }
    finish("hostile", found, in_words(found), args, goals)


if __name__ == "__main__":
    main()
