"""Peers as processes on a real peer-to-peer network share the device; their weights against the simulator's.

A blocking run is computed again: the peers' own data and meetings, with the simulator's swap. What an overlapped run
merges depends on when parts arrive, so its validation loss is compared with that of `noloco-peer simulate`.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer.commands.simulate.exchanges import average, both_merged, swap
from peer.commands.simulate.replica import Replica
from peer.config.schema import Config
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.rounds.types import Outcome
from peer.telemetry.run_log import ROUNDS, RunLog
from peer.training.checkpoint import Checkpoints
from tests.gpu.site import DEMO, ROOT, TINY, Finding, Site, fast, no_network, off

RUN = ("run.steps=120", "run.inner_steps=20", "run.inner.warmup_steps=4", "run.evaluation.batches=4")
CALM = "run.inner.learning_rate=1e-5"  # losses hardly differ: no merge is undone, of which rounds.jsonl says nothing
AWAY = {"cuda": 0.05, "cpu": 5e-3}  # of what the run changed; on an accelerator kernels add in any order
PHASES = ("run.steps=800", "run.inner_steps=100")  # of an overlapped run: a swap fits in one on a busy machine too
LOSS = 0.06  # relative; five such runs beside three busy processes: 0.008 to 0.027
SECONDS = 300  # for a swarm
UNFORESEEN = ("undid a merge", "took the state")  # lines of what a peer has done and rounds.jsonl does not say


def check(site: Site) -> Iterator[Finding]:
    missing = no_network()
    if missing:
        words = f"{missing} is not installed here; give wheels with WHEELS=folder (tests/gpu/README.md)"
        yield Finding("peer-to-peer network", None, words)
        return
    yield _blocking(site, 4, "int8")
    yield _overlapped(site, 2, "int4")


def _blocking(site: Site, peers: int, codec: str) -> Finding:
    subject = f"{peers} processes, blocking, {codec}"
    overrides = _overrides(site, subject, f"run.exchange.codec={codec}", "run.exchange.overlap=false", CALM)
    fault = _swarm(peers, overrides)
    if fault:
        return Finding(subject, False, fault)
    config = site.config(*overrides)
    again = Replay(site, config, peers)
    fault = again.run()
    if fault:
        return Finding(subject, False, fault)
    figures = {"theta_off": again.away(), "merged": again.merged}
    words = f"{again.merged} merges; θ is off by {figures['theta_off']:.1e} of its change from the simulator's"
    words += "".join(f"; {line}" for line in again.unforeseen())
    return Finding(subject, figures["theta_off"] <= AWAY[site.device.type] and again.merged > 0, words, figures)


def _overlapped(site: Site, peers: int, codec: str) -> Finding:
    subject = f"{peers} processes, overlapped, {codec}"
    overrides = _overrides(site, subject, f"run.exchange.codec={codec}", "run.exchange.overlap=true", *PHASES)
    fault = _swarm(peers, overrides)
    if fault:
        return Finding(subject, False, fault)
    folder = site.config(*overrides).run.dir
    real = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["swarm"]["val_loss_mean"]
    simulated = _simulated(peers, (*overrides, f"run.dir={folder / 'simulated'}"))
    merged = sum(row["outcome"] == "merged" for it in range(peers) for row in _rows(folder / f"peer-{it}"))
    away = abs(real / simulated - 1)
    words = f"{merged} merges; validation loss {real:.3f}, {simulated:.3f} in the simulator"
    figures = {"val_loss": real, "simulated_val_loss": simulated, "merged": merged}
    return Finding(subject, away <= LOSS and merged > 0, words, figures)


def _overrides(site: Site, subject: str, *more: str) -> tuple[str, ...]:
    folder = site.folder / subject.replace(" ", "-").replace(",", "")
    return (*TINY, *RUN, f"peer.device={site.device.type}", "peer.precision=fp32", f"run.dir={folder}", *more)


def _swarm(peers: int, overrides: tuple[str, ...]) -> str:
    """Run `noloco-peer swarm`; what went wrong."""
    sets = [word for it in overrides for word in ("--set", it)]
    program = [sys.executable, "-m", "peer", "swarm", "--peers", str(peers), "--config", str(DEMO), *sets]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode or "Traceback" in done.stdout + done.stderr:
        return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
    return ""


def _simulated(peers: int, overrides: tuple[str, ...]) -> float:
    from peer.commands.cli import main

    sets = [word for it in overrides for word in ("--set", it)]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(["simulate", "--replicas", str(peers), "--swap-steps", "2", "--config", str(DEMO), *sets])
    folder = next(Path(it.removeprefix("run.dir=")) for it in reversed(overrides) if it.startswith("run.dir="))
    loss: float = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["swarm"]["val_loss_mean"]
    return loss


def _rows(folder: Path) -> list[dict[str, Any]]:
    return RunLog(folder / ROUNDS).poll()


class Replay:
    """The rounds that the peers have logged, computed again on the same device in one process."""

    def __init__(self, site: Site, config: Config, peers: int) -> None:
        from peer.p2p import identity

        self.merged = 0
        self._folders = {f"peer-{it}": config.run.dir / f"peer-{it}" for it in range(peers)}
        self._rows = {name: _rows(folder) for name, folder in self._folders.items()}
        self._replicas: dict[str, Replica] = {}
        for name, folder in self._folders.items():
            state = site.replica(config, identity.stream_of(identity.load_or_create(folder / "identity.key")))
            codec = codec_named(config.run.exchange.codec, state.outer.slow.numel)
            self._replicas[name] = Replica(name, state, 1.0, config.run.steps, config.run.inner_steps, codec, Guard())
        self._start = fast(self._replicas["peer-0"].state.outer.slow)

    def run(self) -> str:
        """What cannot be computed again."""
        while any(self._rows.values()):
            name = next((it for it, rows in self._rows.items() if rows and self._next(it, rows[0])), None)
            if name is None:
                heads = {it: (rows[0]["outcome"], rows[0]["detail"]) for it, rows in self._rows.items() if rows}
                return f"the rounds of the peers do not fit together: {heads}"
        return ""

    def _next(self, name: str, row: dict[str, Any]) -> bool:
        """Compute this round if its partner is there too."""
        if row["outcome"] == "alone":
            replica = self._train(name)
            replica.codec.end_round(False)
            replica.apply(average([replica])[0])
            replica.cross_boundary(Outcome.ALONE)
            return True
        partner = row["partner"]
        theirs = self._rows.get(partner, [])
        met = theirs and (theirs[0]["outcome"], theirs[0]["partner"]) == (row["outcome"], name)
        if row["outcome"] not in ("merged", "refused") or not met:
            return False
        pair = self._train(name), self._train(partner)
        means, verdicts = swap(*pair)
        merged = both_merged(verdicts)
        if merged is not (row["outcome"] == "merged"):
            return False
        for replica, mean in zip(pair, means, strict=True):
            replica.apply(mean if merged else average([replica])[0])
            replica.cross_boundary(Outcome(row["outcome"]))
        self.merged += merged
        return True

    def _train(self, name: str) -> Replica:
        """The inner phase before the peer's next round, which is taken from the log."""
        replica, row = self._replicas[name], self._rows[name].pop(0)
        steps = row["step"] - replica.state.inner.step
        if not steps:
            replica.pairwise.end_run()
        replica.train(steps)
        return replica

    def unforeseen(self) -> list[str]:
        """Lines of the peers' logs: what they have done and this does not compute."""
        logs = [(folder / "peer.log").read_text(encoding="utf-8") for folder in self._folders.values()]
        return [line for log in logs for line in log.splitlines() if any(it in line for it in UNFORESEEN)]

    def away(self) -> float:
        """The largest difference of a peer's saved θ from the computed one, relative to the change by the run."""
        worst = 0.0
        for name, replica in self._replicas.items():
            saved = Checkpoints(self._folders[name] / "checkpoints", 1).newest()
            assert saved is not None, f"{name} has no checkpoint"
            computed = fast(replica.state.outer.slow)
            replica.state.restore(saved)
            worst = max(worst, off(fast(replica.state.outer.slow) - self._start, computed - self._start))
        return worst
