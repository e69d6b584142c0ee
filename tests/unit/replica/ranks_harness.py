"""A peer of several ranks without a swarm: rank 0 in the test's process, the others as torchrun would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from peer.config.schema import Config
from peer.data import corpus
from peer.process import LoopContext
from peer.replica.sharded.launch import Rank
from peer.replica.sharded.ranks import Ranks
from peer.training import replica as build
from peer.training.state import PeerState
from tests.swarm.support.ports import free_port
from tests.swarm.support.warm import ROOT, Forked, warm

CPU = torch.device("cpu")
MODEL = {"hidden_size": 12, "intermediate_size": 30, "layers": 2, "heads": 2}  # 257 tokens: nothing divides evenly
PROGRAM = ("-m", "peer", "train", "--config", "of-rank-0.yaml")


def config(folder: Path, *, peer: dict[str, Any] | None = None, optimizer: str = "adamw", **run: Any) -> Config:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    held_out = folder / "held-out.txt"
    held_out.write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    data = {"name": "text", "train": [str(text)], "validation": [str(held_out)], "sequence_length": 16}
    inner = {"optimizer": optimizer, "learning_rate": 1e-2, "warmup_steps": 4}
    sizes = {"steps": 40, "batch_size": 12, "evaluation": {"batches": 2}}
    shared = {**sizes, "model": MODEL, "data": data, "inner": inner, **run}
    return Config.model_validate({"run": shared, "peer": {"threads": 1, **(peer or {})}})


def replica(settings: Config, ranks: Ranks | None = None, device: torch.device = CPU) -> PeerState:
    tokens = corpus.load(settings.run.data).train
    return build.replica(settings, tokens, stream=3, device=device, context=LoopContext(), ranks=ranks)


def environment(number: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    said = {**place, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    return {name: str(value) for name, value in said.items()}


class Cold(subprocess.Popen[bytes]):
    """A rank as torchrun starts it: warm.py needs all of a peer's libraries, also those of the network."""

    def __init__(self, program: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("wb") as output:
            command = [sys.executable, *program]
            super().__init__(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


class RankProcesses:
    """The other ranks, and their processes."""

    def __init__(self, size: int, folder: Path, program: Sequence[str] = PROGRAM, *, cold: bool = False) -> None:
        port = free_port()
        self.mine = environment(0, size, port)
        self.logs = [folder / f"rank-{number}.out" for number in range(1, size)]
        self.processes: list[Forked | Cold] = []
        for number, log in enumerate(self.logs, 1):
            its = {**os.environ, **environment(number, size, port), "PYTHONUNBUFFERED": "1"}
            self.processes.append(Cold(program, log, its) if cold else warm().start(program, log, its))
        self.gave_up: list[str] = []
        self.ranks = Ranks(Rank(0, size, port), self.gave_up.append)

    def output(self) -> str:
        return "".join(log.read_text(encoding="utf-8") for log in self.logs)


@contextmanager
def ranks(size: int, folder: Path, program: Sequence[str] = PROGRAM, *, cold: bool = False) -> Iterator[RankProcesses]:
    """The other ranks, which are dismissed at the end and exit."""
    it = RankProcesses(size, folder, program, cold=cold)
    before = dict(os.environ)
    os.environ.update(it.mine)
    code = 1
    try:
        yield it
        code = 0
    finally:
        it.ranks.dismiss(code)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
        for process in it.processes:
            process.kill()
            process.wait(10)


@contextmanager
def replica_on(size: int, settings: Config, folder: Path) -> Iterator[PeerState]:
    """The same replica on ``size`` ranks."""
    if size == 1:
        yield replica(settings)
        return
    with ranks(size, folder) as it:
        yield replica(settings, it.ranks)
        assert it.ranks.lost == ""
    assert [process.returncode for process in it.processes] == [0] * (size - 1), it.output()
    assert "Traceback" not in it.output()
