"""Programs with their own training loop as members of a swarm: two in threads of this process, and the examples."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from peer import OuterLoop, RunError, UserError
from peer.api.account import Round
from peer.rounds.types import Outcome
from peer.swarm.directory.directory import Members
from peer.swarm.directory.records import MemberRecord
from tests.swarm.support.harness import Swarm, wait_for

H = 8
PAUSE = 0.01


class Program:
    """A user's program: a model, AdamW and data."""

    def __init__(self, seed: int = 0, data: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.draw = torch.Generator().manual_seed(data)
        self.rounds: list[Round] = []

    def step(self) -> Tensor:
        batch = torch.randn(32, 6, generator=self.draw)
        loss: Tensor = (self.model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, outer: OuterLoop, steps: int) -> None:
        for _ in range(steps):
            ended = outer.step(tokens=32, loss=self.step())
            threading.Event().wait(PAUSE)
            if ended is not None:
                self.rounds.append(ended)

    def train_until_merged(self, outer: OuterLoop, times: int) -> None:
        """At first a peer may be alone: members read the directory only every few seconds."""
        while sum(it.outcome is Outcome.MERGED for it in self.rounds) < times:
            assert len(self.rounds) < 200, self.rounds
            self.train(outer, H)

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class Scene:
    """Loops in this process; closed at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.addresses: tuple[str, ...] = ()

    def start(self, program: Program, name: str, others: dict[str, Any] | None = None, **keywords: Any) -> OuterLoop:
        here = {"run.dir": str(self._folder), "peer.network.host": "127.0.0.1", "peer.metrics.port": 0}
        here |= {"run.exchange.overlap": False, "run.exchange.codec": "none"}  # tests of overlap say so
        outer = OuterLoop.start(
            program.model,
            run="own",
            inner_steps=H,
            name=name,
            optimizer=program.optimizer,
            initial_peers=self.addresses,
            settings={**here, **(others or {})},
            **keywords,
        )
        self._stack.callback(outer.close)
        self.addresses = self.addresses or outer.addresses
        return outer


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


def together(*works: Callable[[], object]) -> None:
    """Run each in a thread; an exception in one fails the test."""
    failed: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("method", [pytest.param("noloco", marks=pytest.mark.smoke), "diloco"])
def test_two_programs_meet_and_become_one_model(scene: Scene, tmp_path: Path, method: str) -> None:
    one, two = Program(data=1), Program(seed=5, data=2)  # the second one takes the weights of the first
    first = scene.start(one, "one", method=method)
    kept = list(two.model.parameters())
    second = scene.start(two, "two", method=method)
    assert second.adopted and not first.adopted
    assert torch.equal(one.weights(), two.weights())
    assert all(new is old for new, old in zip(two.model.parameters(), kept, strict=True))

    together(lambda: one.train_until_merged(first, 2), lambda: two.train_until_merged(second, 2))

    for program, partner in ((one, "two"), (two, "one")):
        merged = program.rounds[-1]
        assert (merged.outcome, merged.partners) == (Outcome.MERGED, (partner,))
        assert merged.seconds["inner"] > H * PAUSE and merged.bytes_sent > 4 * program.weights().numel()
    assert (first.round, first.last) == (one.rounds[-1].round, one.rounds[-1])
    apart = (one.weights() - two.weights()).norm() / one.weights().norm()
    assert apart < (0.3 if method == "noloco" else 1e-6)  # a group of all peers has equal weights
    rows = [json.loads(line) for line in (tmp_path / "one" / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [it.round for it in one.rounds]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] and rows[-1]["tokens_per_second"] > 0
    as_any_peer(first, second, len(one.rounds) * H)


def as_any_peer(outer: OuterLoop, watching: OuterLoop, steps: int) -> None:
    """Its record in the directory and its metrics."""
    members: Members = watching._member.presence._members

    def look() -> MemberRecord | None:
        found = (it for it in members.refresh_all() if it.name == "one" and it.report.merges == 2)
        return next(found, None)

    record = wait_for(look, 15)
    assert watching.members == 2
    assert (record.step, record.round) == (outer.swarm_step, outer.round) and record.tokens_per_second > 100
    assert record.report.tokens == steps * 32 and record.report.train_loss is not None
    registry = outer._member.resources.metrics.registry
    assert registry.get_sample_value("noloco_inner_steps_total") == steps
    assert registry.get_sample_value("noloco_rounds_total", {"outcome": "merged"}) == 2
    assert registry.get_sample_value("noloco_phase_info", {"phase": "inner"}) == 1


def test_a_program_takes_from_the_swarm_what_it_does_not_say(scene: Scene, tmp_path: Path) -> None:
    """H, method, codec, name: by an address alone. What it does say must fit."""
    one, two = Program(data=1), Program(seed=5, data=2)
    first = scene.start(one, "one", {"run.outer.alpha": 0.2, "run.exchange.codec": "int8"}, method="noloco", steps=400)
    here = {"run.dir": str(tmp_path), "peer.network.host": "127.0.0.1", "peer.metrics.port": 0}
    said: dict[str, Any] = {"optimizer": two.optimizer, "initial_peers": first.addresses[0], "settings": here}
    with OuterLoop.start(two.model, name="two", **said) as second:
        assert second._member.node.member == replace(first._member.node.member, name="two")
        assert second.adopted and second._total == 400
        together(lambda: one.train_until_merged(first, 1), lambda: two.train_until_merged(second, 1))
    for more, difference in (
        ({"inner_steps": H + 1}, f"run.inner_steps is {H + 1} here and {H} there"),
        ({"method": "diloco"}, "this configuration is not the swarm's: run."),
        ({"tag": "mine"}, 'run.tag is "mine" here and "" there'),
    ):
        with pytest.raises(UserError, match=re.escape(difference)):
            OuterLoop.start(two.model, name="three", **said, **more)
    with OuterLoop.start(two.model, run="another", name="three", **said) as third:  # a new run, with the defaults
        assert third.members == 1 and third._member.resources.run.inner_steps == 50


def test_a_program_that_fails_leaves_and_its_own_exception_is_raised(scene: Scene) -> None:
    watching = scene.start(Program(), "watching")
    program = Program()
    with pytest.raises(ZeroDivisionError), scene.start(program, "failing") as outer:
        program.train(outer, 3)
        daemon = psutil.Process(outer._member.node._daemon.pid)  # type: ignore[union-attr]
        raise ZeroDivisionError
    assert not daemon.is_running()
    members: Members = watching._member.presence._members
    wait_for(lambda: not members.refresh_all() or None, 10)
    with pytest.raises(RunError, match="it was closed; start a new one"):
        outer.step()
    outer.close()


def test_broken_weights_reach_no_peer(scene: Scene) -> None:
    one, two = Program(data=1), Program(data=2)
    first, second = scene.start(one, "one"), scene.start(two, "two")

    def broken() -> None:
        one.train(first, H // 2)
        with torch.no_grad():
            one.model[0].weight[1, 1] = torch.nan  # type: ignore[index]
        with pytest.raises(RunError, match=r"the weight 0.weight is not finite at step 8; nobody has got it"):
            one.train(first, H)
        first.close()

    together(broken, lambda: two.train(second, 2 * H))
    assert torch.isfinite(two.weights()).all()
    assert {it.outcome for it in two.rounds} <= {Outcome.ALONE, Outcome.TIMEOUT}


def test_it_resumes_from_its_own_checkpoint(scene: Scene, tmp_path: Path) -> None:
    program = Program()
    with scene.start(program, "one") as outer:
        program.train(outer, H + 3)
        saved = outer.state_dict()
        model = {key: value.clone() for key, value in program.model.state_dict().items()}
    scene.addresses = ()
    again = Program(seed=9)
    again.model.load_state_dict(model)
    outer = scene.start(again, "one", state=saved)
    assert (outer.swarm_step, outer.round, outer.adopted) == (H + 3, 1, False)
    again.train(outer, H - 3)
    assert [it.round for it in again.rounds] == [2]
    again.train(outer, 4)
    outer.load_state_dict(saved)
    assert (outer.swarm_step, outer.round) == (H + 3, 1)
    first = again.step()
    outer.step(tokens=32, loss=first)
    again.train(outer, H - 4)
    *_, row = (json.loads(line) for line in (tmp_path / "one" / "rounds.jsonl").read_text().splitlines())
    assert (row["round"], row["tokens"]) == (2, 2 * 32 * H)
    assert row["first_train_loss"] == float(first.detach())  # not from the discarded steps
    newest = outer.state_dict()
    outer.close()
    scene.addresses = ()
    later = scene.start(again, "one")
    later.load_state_dict(newest)  # only now the peer knows that it resumes
    assert len(rows := (tmp_path / "one" / "rounds.jsonl").read_text().splitlines()) == 2, rows
    scene.addresses = ()  # alone: a member would have refused it before
    with pytest.raises(UserError, match="is of another run: run"):
        scene.start(Program(), "other", state=saved, tag="another run")


def test_the_swap_runs_during_the_steps_with_overlap(scene: Scene, tmp_path: Path) -> None:
    one, two = Program(data=1), Program(data=2)
    overlap = {"run.exchange.overlap": True, "run.exchange.codec": "int8"}
    first, second = scene.start(one, "one", overlap), scene.start(two, "two", overlap)
    together(lambda: one.train_until_merged(first, 2), lambda: two.train_until_merged(second, 2))
    together(first.close, second.close)  # waits for the swap in progress
    assert first.last is not None and first.last.round == first.round
    # a round is reported when its swap has ended, so two reports may be less than a phase apart
    assert sum(it.seconds["inner"] for it in one.rounds) > H * PAUSE
    during = {it.round for it in one.rounds if it.outcome is Outcome.MERGED}  # those that close() ended are not in it
    rows = [json.loads(line) for line in (tmp_path / "one" / "rounds.jsonl").read_text().splitlines()]
    assert all(row["staleness"] >= 1 for row in rows if row["round"] in during), rows  # inner steps; 0 of who waits


def test_a_dead_daemon_is_one_line(scene: Scene) -> None:
    program = Program()
    outer = scene.start(program, "one")
    psutil.Process(outer._member.node._daemon.pid).kill()  # type: ignore[union-attr]
    with pytest.raises(RunError, match=r"the p2p daemon .* has died.*; save your model, then start again"):
        program.train(outer, H)


def test_a_peer_leaves_after_its_last_step(scene: Scene) -> None:
    program = Program()
    outer = scene.start(program, "one", steps=H + 2)
    program.train(outer, H + 4)  # two steps more than the run has
    assert outer.done and outer.swarm_step == H + 2
    assert [it.step for it in program.rounds][-1] == H + 2
    assert outer._member.node._daemon.failure  # type: ignore[union-attr]


def test_two_rounds_that_end_with_the_last_step_are_both_told(scene: Scene) -> None:
    program = Program()
    outer = scene.start(program, "one", {"run.exchange.overlap": True}, steps=2)  # two inner phases of one step
    assert outer.step(tokens=32, loss=program.step()) is None and outer.ended == ()
    last = outer.step(tokens=32, loss=program.step())
    assert outer.done and [it.round for it in outer.ended] == [1, 2]
    assert last == outer.ended[-1] == outer.last


def test_a_different_configuration_is_one_line(scene: Scene) -> None:
    scene.start(Program(), "one", tag="bytes")
    with pytest.raises(UserError, match=r"run\.tag is"):
        scene.start(Program(), "two", tag="words")


def test_a_check_of_its_settings_finds_its_swarm(scene: Scene, swarm: Swarm) -> None:
    scene.start(Program(), "one", tag="bytes")
    sets = ("run.name=own", f"run.inner_steps={H}", "run.tag=bytes", "peer.network.host=127.0.0.1")
    sets = (*sets, "run.exchange.overlap=false", "run.exchange.codec=none")  # as in Scene

    def check(*others: str) -> tuple[int, str]:
        words = [word for it in (*sets, *others) for word in ("--set", it)]
        initial = ["--initial-peers", scene.addresses[0]]
        process = swarm.start("check", ["-m", "peer", "check", "--own-loop", *words, *initial])
        return process.exit_code(), process.output()

    code, said = check()
    assert code == 0 and "1 member trains this configuration" in said and "memory" not in said, said
    code, said = check("run.tag=words")
    assert code == 1 and "run.tag is" in said, said


EXAMPLES = {"bare_loop": ("8000", "200"), "nano_gpt": ("300", "20"), "hf_trainer": ("300", "20")}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_merge(swarm: Swarm, example: str) -> None:
    if example == "hf_trainer":
        pytest.importorskip("accelerate")
    steps, inner_steps = EXAMPLES[example]
    _, address = swarm.bootstrap()
    common = [f"run.dir={swarm.folder}", "peer.network.host=127.0.0.1", "peer.metrics.port=0", "peer.start_with=2"]
    sets = [word for it in common for word in ("--set", it)]
    options = ["--initial-peers", address, "--steps", steps, "--inner-steps", inner_steps, "--threads", "1", *sets]
    peers = [
        swarm.start(name, ["-m", f"peer.api.examples.{example}", "--name", name, *options]) for name in ("one", "two")
    ]
    swarm.note_children()
    for peer in peers:
        assert peer.exit_code() == 0, peer.output()
    for name in ("one", "two"):
        rows = swarm.rounds(name)
        assert rows[-1]["step"] == int(steps)
        assert sum(row["outcome"] == "merged" for row in rows) >= 3, rows
        losses = [row["train_loss"] for row in rows if row["train_loss"] is not None]
        assert losses[-1] < losses[0], rows


def test_ctrl_c_leaves_no_processes(swarm: Swarm) -> None:
    sets = [f"run.dir={swarm.folder}", "peer.network.host=127.0.0.1", "peer.metrics.port=0"]
    arguments = [word for it in sets for word in ("--set", it)]
    peer = swarm.start("one", ["-m", "peer.api.examples.bare_loop", "--steps", "1000000", "--threads", "1", *arguments])
    peer.line(r"step \d+ loss")
    swarm.note_children()
    peer.signal(signal.SIGINT)
    assert peer.exit_code(20) == 0
    assert "Traceback" not in peer.output()
    wait_for(lambda: not swarm.left_over() or None, 10, lambda: str(swarm.left_over()))
