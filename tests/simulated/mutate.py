"""Can the simulation fail? Applies each mutation of mutations.toml in a copy of the tree and looks for it by seeds.

``python -m tests.simulated.mutate [--only NAME ...] [--seeds 200]``. A mutation is found by the first seed in which one
of its own promises is broken (``notices``) or the program fails, and in which they are kept without the mutation.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")
SEEDS = 200
PEERS = 4  # a small swarm breaks as well as a large one, and sooner
LONGEST = 120.0  # seconds of real time for one seed
LIBRARIES = ("torch", "hivemind", "pydantic", "numpy", "prometheus_client")  # imported once, for all replays
MULTIPROCESSING = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Mutation:
    """One defect. ``before`` occurs once in ``file``; ``notices``: parts of the sentences that may report it.

    ``kind``: of the swarms that have this code; empty for all.
    """

    name: str
    file: str
    before: str
    after: str
    notices: tuple[str, ...]
    kind: str = ""

    def apply(self, tree: Path) -> None:
        path = tree / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.before)} times in {self.file}")
        path.write_text(text.replace(self.before, self.after))


@dataclass(frozen=True)
class Found:
    seed: int
    sentence: str


def mutations() -> list[Mutation]:
    """All of the list."""
    entries = tomllib.loads(LIST.read_text())["mutation"]
    return [Mutation(**{**it, "notices": tuple(it["notices"])}) for it in entries]


def copied(folder: Path) -> Path:
    """A copy of what a simulation needs."""
    tree = folder / "tree"
    for name in ("peer", "dht_bootstrap", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results", "*.png"))
    return tree


def replay(tree: Path, seeds: range, mutation: Mutation) -> Found | None:
    """The first of ``seeds`` that breaks a promise of the mutation in ``tree``, mutated or not."""
    reading, writing = MULTIPROCESSING.Pipe(duplex=False)
    child = MULTIPROCESSING.Process(target=_replay, args=(tree, seeds, mutation, writing))
    child.start()
    writing.close()
    seed, found = seeds[0], None
    try:
        while reading.poll(LONGEST):
            seed, sentence = reading.recv()
            if sentence:
                found = Found(seed, sentence)
        return found or Found(seed, f"a seed takes more than {LONGEST:.0f} s")
    except EOFError:
        return found
    finally:
        child.kill()
        child.join()


def _replay(tree: Path, seeds: range, mutation: Mutation, results: Connection) -> None:
    """In a process of its own, which imports all from ``tree``. Sends each seed, and a sentence with the last."""
    sys.dont_write_bytecode = True  # a file that changes twice in a second would be read from its first bytecode
    for name in [it for it in sys.modules if it.partition(".")[0] in ("tests", "peer")]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    os.chdir(tree)
    try:
        drawn = importlib.import_module("tests.simulated.scenario").scenario
        simulate = importlib.import_module("tests.simulated.world").simulate
        for seed in seeds:
            results.send((seed, ""))
            broken = simulate(drawn(seed, PEERS, mutation.kind or None)).violations
            seen = [it for it in broken if any(part in it for part in mutation.notices)]
            if seen:
                results.send((seed, seen[0]))
                break
    except Exception as error:  # noqa: BLE001 - the mutation breaks the program
        results.send((seed, f"the program fails: {type(error).__name__}: {error}"))


def hunt(mutation: Mutation, tree: Path, seeds: int) -> Found | None:
    """``tree``: a copy without a mutation; it is one again afterwards."""
    text = (tree / mutation.file).read_text()
    first = 0
    try:
        while first < seeds:
            mutation.apply(tree)
            found = replay(tree, range(first, seeds), mutation)
            (tree / mutation.file).write_text(text)
            if found is None:
                return None
            control = replay(tree, range(found.seed, found.seed + 1), mutation)
            if control is None:
                return found
            print(f"seed {found.seed} without a mutation: {control.sentence}", file=sys.stderr)
            first = found.seed + 1
        return None
    finally:
        (tree / mutation.file).write_text(text)


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # as in __main__.py
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.mutate", description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of mutations")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    chosen = [it for it in mutations() if not args.only or it.name in args.only]
    missed = 0
    print("| mutation | seed | found by | s |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(Path(folder))
        for mutation in chosen:
            began = time.monotonic()
            found = hunt(mutation, tree, args.seeds)
            missed += found is None
            where, how = (str(found.seed), found.sentence) if found else ("-", f"nothing in {args.seeds} seeds")
            print(f"| {mutation.name} | {where} | {how} | {time.monotonic() - began:.0f} |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 0 if missed <= len(chosen) // 25 else 1


if __name__ == "__main__":
    sys.exit(main())
