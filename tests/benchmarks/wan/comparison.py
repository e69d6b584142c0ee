"""Methods compared by real peers on a slow network: idle time, bytes sent and loss.

python -m tests.benchmarks.wan [--quick] [--json FILE]

Each peer has its own host in the network laboratory (tests/netlab); the last one runs at half speed. All methods train
the same model on the same text for the same number of steps, in three stages (stages.py):

demo    the demo's model on links of 10 Mbit/s up, 50 down and 60 ms. Two libraries are compared too: hivemind's own
        Optimizer and torchft's DiLoCo (``pip install torchft==0.2.0``; left out where it is not installed)
21M     a model of 21 million parameters on links of 25 Mbit/s up
eu      the demo's model on links of 100 Mbit/s and 20 ms, for the time spent waiting for a straggler. In the stages
        above eight peers share two cores, so a peer that is stopped half of the time has a core for itself while the
        others wait. Here an inner step takes a fixed time (paced_peer.py), and twice that at the last peer. All make
        the same number of steps. With NoLoCo the straggler is half through when the others end, and goes on alone.

Also measured: the goodput of a swap and the time from a boundary to the partner. Runs in FILE's ``.runs.json`` are not
repeated, so an interrupted benchmark can be continued.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import wan_goodput
from tests.benchmarks.common import Known, finish, options
from tests.benchmarks.wan import match as wan_match
from tests.benchmarks.wan import others, swarm
from tests.benchmarks.wan.plot import plot
from tests.benchmarks.wan.stages import OTHERS, Stage, stages
from tests.benchmarks.wan.swarm import Job

TARGET = 1.02  # times the highest final loss, which all methods reach


def run_one(stage: Stage, job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"wan-{job.name}-") as folder:
        if job.name in OTHERS:
            return others.run(OTHERS[job.name], stage.plan, job, Path(folder))
        return swarm.run(stage.plan, job, Path(folder))


def runs(stage: Stage, known: Known) -> dict[str, dict[str, Any]]:
    """Figures by method; a library that fails is left out with a message."""
    found: dict[str, dict[str, Any]] = known.found.setdefault(stage.name, {})
    for job in stage.jobs():
        library = OTHERS.get(job.name)
        if job.name in found or (library and importlib.util.find_spec(library) is None):
            continue
        try:
            found[job.name] = run_one(stage, job)
        except RuntimeError as error:
            if library is None:
                raise
            print(f"{stage.name} {job.name}: {error}", flush=True)
            continue
        words = {key: value for key, value in found[job.name].items() if key != "losses"}
        print(
            f"{stage.name} {job.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in words.items()), flush=True
        )
        known.save()
    time_to_target(found)
    return found


def time_to_target(found: dict[str, dict[str, Any]]) -> None:
    """Add to each run when the mean training loss of its peers reached the target that all methods reach."""
    target = TARGET * max(run["losses"][-1][1] for run in found.values())
    for run in found.values():
        run["seconds_to_target"] = next(seconds for seconds, loss in run["losses"] if loss <= target)
        run["target"] = target


def figures(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    keys = ("idle_share", "val_loss", "bytes_per_round", "seconds_to_target")
    return {key: {name: run[key] for name, run in found.items()} for key in keys}


def main() -> None:
    args = options("methods compared by real peers on a slow network")
    known, every = Known(args.json), stages(quick=args.quick)
    found = {stage.name: runs(stage, known) for stage in every}
    goodput = known.get("goodput", lambda: wan_goodput.measure(quick=args.quick))
    match = known.get("match", lambda: wan_match.measure((4, 8), 2) if args.quick else wan_match.measure((4, 8, 24), 5))
    result = {
        **figures(found["demo"]),
        "parameters": every[0].parameters(),
        "goodput_share": goodput,
        **match,
        "stages": {it.name: {"parameters": it.parameters(), **figures(found[it.name])} for it in every},
        "runs": found,
    }
    if args.json:
        plot(found, args.json.with_suffix(".png"))
    idle, waiting = result["idle_share"], result["stages"]["eu"]["idle_share"]
    words = (
        f"idle share on 10 Mbit/s: NoLoCo {idle['noloco']:.1%}, int4 {idle['noloco_int4']:.1%}, "
        f"overlapped int4 {idle['noloco_overlap']:.2%}, DiLoCo {idle['diloco']:.1%}; on 100 Mbit/s with a paced "
        f"straggler: NoLoCo {waiting['noloco']:.1%}, DiLoCo {waiting['diloco']:.1%}; a swap gets "
        f"{goodput['link_100mbit']:.0%} of 100 Mbit/s and {goodput['loopback']:.0%} of a bare stream on loopback"
    )
    finish("wan", result, words, args.json)


if __name__ == "__main__":
    main()
