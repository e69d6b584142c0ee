"""Shared by all benchmarks: options, known runs, goals, and the JSON with command and commit."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tests.commit import commit


def options(description: str) -> argparse.Namespace:
    return parse(command_line(description))


def command_line(description: str) -> argparse.ArgumentParser:
    """``--quick`` runs the same code with less work: at most four minutes on two cores."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less work, the same code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a goal is missed")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options. A file of full runs takes no quick ones, nor the other way round."""
    args = parser.parse_args()
    commit()  # now: one that is made meanwhile is not what runs
    if args.json is not None and args.json.exists():
        _same_kind(args.json, json.loads(args.json.read_text()).get("made_by", {}), args)
    return args


def finish(
    name: str,
    figures: dict[str, Any],
    words: str,
    args: argparse.Namespace,
    goals: Mapping[str, bool] | None = None,
    **settings: Any,
) -> None:
    """Write the JSON and print ``words``, then each goal that is missed; with ``--check`` exit with 1 for it.

    ``goals``: which of them, in words, are met.
    """
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        made = made_by(name, quick=args.quick, **settings)
        args.json.write_text(json.dumps({**figures, "made_by": made}, indent=1) + "\n", encoding="utf-8")
    print(words)
    missed = [goal for goal, met in (goals or {}).items() if not met]
    for goal in missed:
        print(f"goal missed: {goal}")
    if args.check and goals is None:
        print("this benchmark has no goals")
    if args.check and missed:
        sys.exit(1)


def made_by(name: str, **settings: Any) -> dict[str, Any]:
    """What made a result: command, commit, day, versions and ``settings``."""
    return {
        "command": f"python -m tests.benchmarks.{name} {' '.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **settings,
    }


class Known:
    """Finished measurements, kept in ``.runs.json`` next to the figures, each with what made it.

    ``name``: of the benchmark. Those of a file are not made again; a file of full runs takes no quick ones.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._quick = name, args.quick
        self._file = file = args.json.with_suffix(".runs.json") if args.json else None
        self.found: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
        for run in self.found.values():
            _same_kind(file, run.get("made_by", {}), args)

    def add(self, name: str, figures: Mapping[str, Any], **settings: Any) -> None:
        """Keep a measurement."""
        self.found[name] = {**figures, "made_by": made_by(self._name, quick=self._quick, **settings)}
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def get(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The known figures, or those of ``measure``."""
        if name not in self.found:
            figures = measure()
            print(f"{name}: {figures}", flush=True)
            self.add(name, figures)
        return {key: value for key, value in self.found[name].items() if key != "made_by"}

    def run_all(
        self,
        work: Callable[[Any], dict[str, Any]],
        cases: Mapping[str, Any],
        at_once: int | None = None,
        shown: Callable[[dict[str, Any]], str] = str,
    ) -> list[dict[str, Any]]:
        """What ``work`` makes of each of the ``cases``, in their order: of those that are not known in a process of its
        own, ``at_once`` or one a core at a time.
        """
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(at_once or os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
            futures = {pool.submit(work, case): name for name, case in cases.items() if name not in self.found}
            for future in as_completed(futures):
                self.add(futures[future], future.result())
                print(f"{futures[future]}: {shown(future.result())}", flush=True)
        return [self.found[name] for name in cases]


def _same_kind(file: Path | None, made: Mapping[str, Any], args: argparse.Namespace) -> None:
    quick = made.get("quick", "--quick" in made.get("command", "").split())
    if quick != args.quick:
        sys.exit(f"--json {file}: it has {'quick' if quick else 'full'} runs, these are not: name another file")
