"""Methods compared by real peers on a slow network: who waits how long, sends how much and learns what.

python -m tests.benchmarks.wan [--quick] [--json FILE]

Each peer is a host of its own in the network laboratory (tests/netlab: 10 Mbit/s up, 50 down, 60 ms), the last one runs
at half speed. All methods train on the same text for the same number of steps. Further, the goodput of a swap and the
time from a boundary to the partner.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peer import model, settings
from tests.benchmarks import wan_goodput, wan_match
from tests.benchmarks.common import finish, options
from tests.benchmarks.wan_swarm import Job, run
from tests.netlab.plan import load


def jobs(*, quick: bool) -> list[Job]:
    """One a method. NoLoCo with half of DiLoCo's H sends as many bytes."""
    peers, steps, more = (3, 60, 20) if quick else (8, 240, 40)
    common = (f"run.steps={steps}", "run.inner.warmup_steps=20", "run.evaluation.every_rounds=1000")
    common += ("run.evaluation.batches=4", "run.batch_size=4", "run.exchange.timeout=120")
    file = "configs/demo.yaml"
    h20, h40 = (*common, "run.inner_steps=20"), (*common, f"run.inner_steps={more}")
    seconds = 150.0 if quick else 900.0
    pairs = {
        "noloco": ("run.exchange.overlap=false", "run.exchange.codec=none"),
        "noloco_int4": ("run.exchange.overlap=false", "run.exchange.codec=int4"),
        "noloco_overlap": ("run.exchange.overlap=true", "run.exchange.codec=int4"),
    }
    return [
        *(Job(name, file, (*h20, *exchange), peers, seconds, 20) for name, exchange in pairs.items()),
        Job("diloco", "configs/demo-diloco.yaml", h40, peers, seconds, more),
    ]


def parameters() -> int:
    """Of the demo's model."""
    run = settings.load(Path("configs/demo.yaml"), []).run
    network = model.build(run.model, sequence_length=run.data.sequence_length, seed=run.seed)
    return sum(parameter.numel() for parameter in network.parameters())


def main() -> None:
    args = options("methods compared by real peers on a slow network")
    plan = load("home")
    runs: dict[str, dict[str, Any]] = {}
    for job in jobs(quick=args.quick):
        with tempfile.TemporaryDirectory(prefix=f"wan-{job.name}-") as folder:
            runs[job.name] = run(plan, job, Path(folder))
        figures = {key: value for key, value in runs[job.name].items() if key != "losses"}
        print(f"{job.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    goodput = wan_goodput.measure(quick=args.quick)
    print(f"goodput: {goodput}", flush=True)
    match = wan_match.measure((4, 8), 4) if args.quick else wan_match.measure((4, 8, 24), 8)
    print(f"match: {match}", flush=True)
    result = {
        **{key: {name: it[key] for name, it in runs.items()} for key in ("idle_share", "val_loss", "bytes_per_round")},
        "parameters": parameters(),
        "goodput_share": goodput,
        **match,
        "runs": runs,
    }
    idle = result["idle_share"]
    words = (
        f"idle share on 10 Mbit/s with a straggler: NoLoCo {idle['noloco']:.1%}, int4 {idle['noloco_int4']:.1%}, "
        f"overlapped int4 {idle['noloco_overlap']:.2%}, DiLoCo {idle['diloco']:.1%}; a swap gets "
        f"{goodput['link_100mbit']:.0%} of 100 Mbit/s and {goodput['loopback']:.0%} of a bare stream on loopback"
    )
    finish("wan", result, words, args.json)


if __name__ == "__main__":
    main()
