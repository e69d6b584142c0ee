"""The finished runs, by (stage, method, number) in FILE's ``.runs.json``: what is there is not measured again.

Each run has its own command, commit, date and settings. One with other settings than today's is refused, so quick runs,
runs of an earlier form and full ones never mix.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from peer.errors import UserError
from tests.benchmarks.common import Known
from tests.benchmarks.wan.figures import figures
from tests.benchmarks.wan.processes import run
from tests.benchmarks.wan.stages import METHODS, Method, Stage

OVERRAN = 0.05  # share of inner steps that may overrun their set time; a run with more is made again
TRIES = 3

Run = dict[str, Any]


class Runs:
    """All of ``known``. Raises :class:`UserError`."""

    def __init__(self, known: Known, stages: dict[str, Stage]) -> None:
        self._known = known
        for key, entry in known.found.items():
            stage, method, _ = key.split("/")
            known = stage in stages and method in METHODS
            if not known or entry["settings"] != _plain(stages[stage].settings(METHODS[method])):
                raise UserError(f"{key} was made with other settings than today's; give another --json")

    def of(self, stage: str, method: str) -> list[Run]:
        """The runs of a cell of the table."""
        return [run for key, run in self._known.found.items() if key.rpartition("/")[0] == f"{stage}/{method}"]

    def make(self, stage: Stage, method: Method, number: int) -> None:
        """Measure run ``number``, unless it is there."""
        key = f"{stage.name}/{method.name}/{number}"
        if key in self._known.found:
            return
        for _ in range(TRIES):
            with tempfile.TemporaryDirectory(prefix="wan-") as folder:
                measured = figures(stage, run(stage, method, Path(folder)))
            shown = ", ".join(f"{name} {value:.4g}" for name, value in measured.items() if isinstance(value, float))
            print(f"{key}: {shown}", flush=True)
            if measured["overran_share"] <= OVERRAN:
                break
            print(f"{key}: discarded, {measured['overran_share']:.1%} of the steps overran their time", flush=True)
        else:
            raise RuntimeError(f"{key}: this machine is too loaded for the set time of an inner step")
        self._known.add(key, {**measured, "settings": _plain(stage.settings(method))})


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain
