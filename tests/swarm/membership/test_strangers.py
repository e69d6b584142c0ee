"""Divergence: parts of a swarm that were separated until their weights have nothing in common become one again."""

from __future__ import annotations

import shutil
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peer.config.load import load
from peer.replica.model import outline
from peer.training.checkpoint import Checkpoints
from tests.saved import save_checkpoint
from tests.swarm.commands.test_own_loop import Scene, together
from tests.swarm.membership.test_late import Late
from tests.swarm.support.harness import DEMO, TINY, Process, Swarm, wait_for

TOOK = r"this peer has nothing in common with the swarm: took its weights: own_round=(\d+) round=(\d+)"
LONG = ("run.steps=1000000", "run.inner_steps=100", "run.inner.learning_rate=3e-4", "peer.checkpoint.every_rounds=10")


@pytest.mark.parametrize("overlap", [False, True])
def test_of_two_peers_with_their_own_loop_the_one_with_fewer_rounds_takes_the_weights_of_the_other(
    tmp_path: Path, overlap: bool
) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        far = Late(scene, "a", overlap, seed=1)
        scene.addresses = ()
        less = Late(scene, "b", overlap, seed=2)
        # the lead is too small for a late join
        together(*(partial(it.train, partial(has_made, it, rounds)) for it, rounds in ((far, 12), (less, 8))))
        less.find(far.outer.addresses[0])
        together(*(partial(it.train, partial(has_merged, it, 3)) for it in (far, less)))
        assert (far.outer.adopted, less.outer.adopted) == (False, True)
        assert less.program.rounds[-1].distance is not None and less.program.rounds[-1].distance < 0.5


class Copies:
    """Trainers that resume from copies of one checkpoint; those of ``others`` from its mirror image."""

    def __init__(self, swarm: Swarm, names: str, others: str, overlap: str) -> None:
        self.swarm, self.names = swarm, names
        self._sets = (*LONG, f"run.exchange.overlap={overlap}")
        _, self._address = swarm.bootstrap()
        first = self.start("first", "first")
        swarm.wait_for_rounds("first", 5)
        first.signal(signal.SIGTERM)
        assert first.exit_code() == 0
        for name in names:
            shutil.copytree(swarm.folder / "first" / "checkpoints", swarm.folder / name / "checkpoints")
            if name in others:
                mirror(Checkpoints(swarm.folder / name / "checkpoints", keep=3))
        together = (f"peer.start_with={len(names)}", "peer.start_patience=120")
        self.peers = {name: self.start(name, name, *together) for name in names}

    def start(self, process: str, name: str, *sets: str) -> Process:
        return self.swarm.start(process, self.swarm.train(name, *self._sets, *sets, address=self._address))

    def names_that_took(self) -> str:
        return "".join(name for name, process in self.peers.items() if "took its weights" in process.output())


@pytest.mark.parametrize(("overlap", "names"), [("false", "abc"), ("true", "ab")])
def test_the_smaller_part_of_a_swarm_takes_the_weights_of_the_larger(swarm: Swarm, overlap: str, names: str) -> None:
    copies = Copies(swarm, names, names[-1], overlap)
    smaller = "c" if "c" in names else wait_for(copies.names_that_took, 60)
    own, theirs = map(int, copies.peers[smaller].line(TOOK).groups())
    merged_with(swarm, smaller, set(names) - {smaller}, after=theirs)
    assert copies.names_that_took() == smaller
    rows = swarm.rounds(smaller)
    before = [row for row in rows if row["round"] < min(own, theirs)]
    assert not [row for row in before if row["outcome"] == "merged"], before
    assert [row["round"] for row in rows] == sorted({row["round"] for row in rows})

    copies.peers[smaller].signal(signal.SIGKILL)
    copies.peers[smaller].exit_code(10)
    again = copies.start("again", smaller)
    again.line("resumed: ")
    since = len(swarm.rounds(smaller))
    wait_for(lambda: any(row["outcome"] == "merged" for row in swarm.rounds(smaller)[since:]), 60)
    assert "nothing in common" not in again.output()


def test_two_halves_become_one(swarm: Swarm) -> None:
    copies = Copies(swarm, "abcd", "cd", "false")

    def met(name: str) -> set[str]:
        """The partners of its merges since its last refusal for distance."""
        rows = swarm.rounds(name)
        last = max((place for place, row in enumerate(rows) if row["reason"] == "far"), default=len(rows))
        return {row["partner"] for row in rows[last:] if row["outcome"] == "merged"}

    for name in "abcd":
        wait_for(partial(lambda name: met(name) >= set("abcd") - {name}, name), 60)
    # Two are enough. On a busy machine the others may learn too late that these have taken theirs, and take them back.
    assert len(copies.names_that_took()) >= 2


def has_made(late: Late, rounds: int) -> bool:
    return late.outer.round >= rounds


def has_merged(late: Late, times: int) -> bool:
    return sum(it.outcome == "merged" for it in late.program.rounds) >= times


def mirrored(name: str, weights: Tensor) -> Tensor:
    """The same function with every number in the residual stream negated."""
    flips = ("embed_tokens", "o_proj", "down_proj", "norm")
    return -weights if any(word in name for word in flips) else weights


def mirror(checkpoints: Checkpoints) -> None:
    """Mirror the newest checkpoint."""
    saved = checkpoints.newest()
    assert saved is not None
    run = load(DEMO, TINY).run
    names = [name for name, _ in outline(run).named_parameters()]
    model = saved.tensors["model"]
    assert set(names) == set(model)
    changed = {name: mirrored(name, model[name]) for name in names}
    outer = {}
    for key, vector in saved.tensors["outer"].items():
        pieces = vector.split([model[name].numel() for name in names])
        outer[key] = torch.cat([mirrored(name, it) for name, it in zip(names, pieces, strict=True)])
    tensors = {**saved.tensors, "model": changed, "outer": outer}
    assert save_checkpoint(checkpoints, saved.state["step"], saved.state, tensors.items())


def merged_with(swarm: Swarm, name: str, others: set[str], after: int) -> None:
    def met() -> set[str]:
        rows = [row for row in swarm.rounds(name) if row["round"] > after and row["outcome"] == "merged"]
        assert all(row["distance"] < 0.6 for row in rows), rows
        return {row["partner"] for row in rows}

    wait_for(lambda: met() >= others, 90)
