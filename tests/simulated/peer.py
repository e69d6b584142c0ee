"""One simulated peer: the product's trainer and membership on a simulated host."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer.config.schema import Config
from peer.errors import RunError, UserError
from peer.outer.method import outer_method
from peer.outer.slow_weights import SlowWeights
from peer.process import LoopContext, Pause, Stop
from peer.swarm.connect import connect
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.training.member import Membership
from peer.training.resources import Resources, member_node
from peer.training.run_folder import RunFolder
from peer.training.saving import Saver
from peer.training.trainer import Trainer
from peer.training.validation import Validation
from tests.simulated.harm import lies
from tests.simulated.loop import Process
from tests.simulated.p2p.network import Host
from tests.simulated.training import TOKENS, Disk, DiskCheckpoints, PacedLoop, SimulatedState

CHANCE = 5.5  # the loss of a guess


@dataclass(eq=False)
class SimulatedPeer:
    """A peer and its machine. ``lives``: how often its process was started."""

    name: str
    host: Host
    config: Config
    folder: Path
    step_seconds: float
    numel: int
    seed: int
    skew: float = 0.0
    lie: str = ""
    bad_relay: str = ""
    disk: Disk = field(default_factory=Disk)
    lives: int = 0
    due: float = float("inf")  # virtual time from which it was meant to run without a further interruption
    process: Process | None = None
    stop: Stop = field(default_factory=Stop)
    pause: Pause = field(default_factory=Pause)
    paused_at: float = 0.0  # virtual time of its last request to pause
    trainer: Trainer | None = None
    ended: str = ""  # why its process has ended
    damaged: bool = False  # its machine has sent what it did not mean
    out: float = float("inf")  # virtual time from which no member should take it for one
    authority: Callable[[], Any] = lambda: None  # of a new process, in an invited swarm
    born: Callable[[SimulatedPeer, SimulatedState], None] = lambda peer, state: None  # called before it joins

    @property
    def training(self) -> bool:
        """It has joined, its process runs, and it is not paused."""
        runs = self.process is not None and not self.process.dead and not self.ended
        return self.trainer is not None and runs and not self.pause.active

    @property
    def honest(self) -> bool:
        """It does no harm, and its invitation has not ended."""
        return not self.lie and self.out == float("inf")

    def main(self, watch: Any) -> None:
        """The process, from its start to its end. ``watch``: is called with this peer when it has joined."""
        try:
            self._train(watch)
            self.ended = "done"
        except (RunError, UserError) as error:
            self.ended = f"{type(error).__name__}: {error}"
        except Exception as error:
            self.ended = f"DEFECT {type(error).__name__}: {error}"
            raise

    def _train(self, watch: Any) -> None:
        run, own = self.config.run, self.config.peer
        metrics = Metrics()
        context = LoopContext(stop=self.stop, pause=self.pause)
        state = self._state(context)
        lies.in_state(self.lie, state)
        self.born(self, state)
        resources = Resources(
            run=run,
            own=own,
            device=torch.device("cpu"),
            folder=RunFolder(self.name, self.folder, -1),
            key=self.folder / "identity.key",
            authority=self.authority(),
            peer_id=self.host.peer_id,
            metrics=metrics,
            metrics_address="",
            timer=ActivityTimer(metrics),
            context=context,
        )
        with ExitStack() as stack:
            node = member_node(resources)
            stack.callback(node.stop)
            with resources.timer("join"):
                connect(node, run)
            member = Membership(resources, node, state, total=run.steps, tokens_per_step=lambda: 64.0)
            stack.callback(member.close)
            member.join(state.resume)
            batches = [torch.zeros(1, TOKENS + 1)]
            validation = Validation(state, resources.timer, CHANCE, batches, {})  # type: ignore[arg-type]
            checkpoints: Any = DiskCheckpoints(self.disk, self.step_seconds)
            saver = Saver(checkpoints, state, member.reporter, resources.timer)  # type: ignore[arg-type]
            self.trainer = Trainer(self.config, member, state, saver, validation)  # type: ignore[arg-type]
            stack.callback(setattr, self, "trainer", None)
            if self.lie:
                lies.in_exchange(self.lie, self.trainer)
            watch(self)
            self.trainer.run()

    def _state(self, context: LoopContext) -> SimulatedState:
        common = torch.Generator().manual_seed(7)
        first = torch.randn(self.numel, generator=common)
        best = torch.randn(self.numel, generator=common)
        weights = nn.Parameter(first)
        seed = random.Random(f"{self.seed} {self.lives}").getrandbits(32)
        inner = PacedLoop(weights, best, self.step_seconds, context, seed)
        run, slow = self.config.run, SlowWeights([("w", weights)])
        return SimulatedState(inner, outer_method(run, slow), self.disk, feedback=run.exchange.feedback)
