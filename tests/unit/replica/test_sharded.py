"""A peer of several ranks is, for everybody who looks at it, the peer of one rank."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch

from peer.commands import cli
from peer.commands.cli import main
from peer.errors import RunError, UserError
from peer.replica.sharded import channel, launch
from peer.replica.sharded.ranks import Ranks
from peer.training.checkpoint import Checkpoints
from tests.saved import resume
from tests.swarm.support.ports import free_port
from tests.unit.parts import alone, theta
from tests.unit.replica.ranks_harness import config, environment, ranks, replica, replica_on

AWAY = {"adamw": 1e-4, "muon": 1e-2}  # of what training changed; Muon orthogonalises in bfloat16


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_conform(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every kind of slow weights does with the fast ones, by the flat vector and by name."""
    monkeypatch.setattr(channel, "WINDOW_ELEMENTS", 1000)
    settings = config(tmp_path)
    expected = replica(settings)
    with replica_on(size, settings, tmp_path) as state:
        slow, whole = state.outer.slow, expected.outer.slow
        assert slow.layout() == whole.layout() and slow.numel == whole.numel
        assert torch.equal(slow.phi, whole.phi) and torch.equal(theta(state), whole.phi)
        assert slow.phi.dtype == torch.float32 and not slow.phi.is_cuda

        slow.phi.copy_(torch.arange(slow.numel))
        slow.write_fast(700, 2345)  # a part of it, over the borders of parameters, shards and windows
        mixed = whole.phi.clone()
        mixed[700:2345] = torch.arange(700, 2345)
        part = torch.empty(2500)
        slow.read_fast(123, part)
        assert torch.equal(part, mixed[123:2623])
        slow.add_to_fast(torch.full((1501,), 0.5), 900)
        mixed[900:2401] += 0.5
        assert torch.equal(theta(state), mixed)
        slow.write_fast()
        assert torch.equal(theta(state), slow.phi)

        named = slow.tensors()
        assert {name: it.shape for name, it in named.items()} == {
            name: it.shape for name, it in whole.tensors().items()
        }
        assert torch.equal(torch.cat([it.reshape(-1) for it in named.values()]), slow.phi)
        slow.take({name: torch.full(it.shape, 7.0) for name, it in named.items()})
        assert torch.equal(theta(state), torch.full((slow.numel,), 7.0))

        optimizer = state.inner.optimizer
        moments: dict[str, torch.Tensor] = {}
        for name, it in named.items():
            own = {"step": torch.tensor(3.0), "exp_avg": torch.randn(it.shape), "exp_avg_sq": torch.rand(it.shape)}
            moments |= {f"{name}/{key}": value for key, value in own.items()}
        slow.take_moments(optimizer, moments)
        kept = slow.moments(optimizer)
        assert kept.keys() == moments.keys() and all(torch.equal(kept[key], moments[key]) for key in moments)
        slow.take_moments(optimizer, {})
        assert slow.moments(optimizer) == {}


@pytest.mark.parametrize(
    ("size", "peer", "optimizer"),
    [
        (2, {}, "adamw"),
        pytest.param(3, {"micro_batch": 2, "gradient_checkpointing": True}, "adamw", marks=pytest.mark.long),
        (2, {}, "muon"),
        pytest.param(3, {"micro_batch": 2}, "muon", marks=pytest.mark.long),
    ],
    ids=["two", "three with micro-batches and checkpointed activations", "two with Muon", "three with Muon"],
)
def test_it_trains_and_resumes_as_on_one_rank(
    size: int, peer: dict[str, Any], optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, peer=peer, optimizer=optimizer)
    one, home = replica(settings), tmp_path / "peer"
    start = theta(one)
    batches = [one.stream.batch(1000), one.stream.batch(1001)]  # type: ignore[attr-defined]
    with replica_on(size, settings, tmp_path) as many:
        untrained = one.inner.evaluate(batches)
        assert many.inner.evaluate(batches) == pytest.approx(untrained, rel=1e-5)
        for _ in range(2):
            expected, got = one.inner.run(one.stream.take(3)), many.inner.run(many.stream.take(3))
            assert got.loss == pytest.approx(expected.loss, rel=1e-4)
            assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
            assert got.tokens == expected.tokens
            alone(one)
            alone(many)
            assert many.inner.evaluate(batches) == pytest.approx(one.inner.evaluate(batches), rel=1e-4)
        away = (theta(many) - theta(one)).norm() / (theta(one) - start).norm()
        assert away < AWAY[optimizer]
        assert one.inner.evaluate(batches) < untrained - 0.01
        store = Checkpoints(home / "checkpoints", 2)
        again = replica(settings)
        saved = resume(store, many, again)  # on one rank what several have saved
        torch.testing.assert_close(theta(again), theta(many), rtol=0, atol=0)
        after = [again.inner.run(again.stream.take(2)).loss, many.inner.run(many.stream.take(2)).loss]
        assert after[0] == pytest.approx(after[1], rel=1e-5)
        assert resume(store, again, many).path != saved.path  # and the other way round
        after = [it.inner.run(it.stream.take(2)).loss for it in (again, many)]
        assert after[0] == pytest.approx(after[1], rel=1e-5)
    with pytest.raises(SystemExit) as exit:
        main(["export", str(home), str(tmp_path / "model")])
    assert exit.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_with_muon_is_that_of_one_rank(size: int, tmp_path: Path) -> None:
    """Also where the rows of a matrix, or the matrices, cannot be divided by the ranks. Only the rounding differs."""
    settings = config(tmp_path, optimizer="muon")
    one = replica(settings)
    with replica_on(size, settings, tmp_path) as many:
        for _ in range(3):
            before = theta(one)
            one.inner.run(one.stream.take(1))
            many.inner.run(many.stream.take(1))
            assert (theta(one) - before).abs().max() > 1e-3
            torch.testing.assert_close(theta(many), theta(one), rtol=1e-5, atol=1e-6)
        kept, expected = (it.outer.slow.moments(it.inner.optimizer) for it in (many, one))
        assert kept.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(kept[key], value, rtol=1e-3, atol=1e-6)


def test_bf16_is_gathered_and_the_weights_stay_fp32(tmp_path: Path) -> None:
    settings = config(tmp_path, peer={"precision": "bf16"})
    one = replica(settings)
    with replica_on(2, settings, tmp_path) as many:
        expected, got = one.inner.run(one.stream.take(6)), many.inner.run(many.stream.take(6))
        assert got.loss == pytest.approx(expected.loss, rel=0.01)
        assert {it.dtype for it in many.outer.slow.tensors().values()} == {torch.float32}


def test_pretrained_weights_of_another_family(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 257, "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=256, eos_token_id=256)).save_pretrained(tmp_path / "gpt2")
    model = {"name": "auto", "source": str(tmp_path / "gpt2"), "pretrained": True}
    settings = config(tmp_path, model=model)
    one = replica(settings)
    with replica_on(2, settings, tmp_path) as many:
        assert torch.equal(theta(many), theta(one))
        expected, got = one.inner.run(one.stream.take(3)), many.inner.run(many.stream.take(3))
        assert got.loss == pytest.approx(expected.loss, rel=1e-4)
        torch.testing.assert_close(theta(many), theta(one), rtol=1e-3, atol=1e-4)


def test_a_rank_holds_its_shard_and_nothing_whole(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "layers": 2, "heads": 2}
    settings = config(tmp_path, model=wide)
    account = tmp_path / "account"
    with ranks(2, tmp_path, ("-m", "tests.unit.replica.rank_account", str(account))) as it:
        state = replica(settings, it.ranks)
        state.inner.run(state.stream.take(2))
        alone(state)
        state.inner.evaluate(list(state.stream.take(1)))
        theta(state)
    held = [json.loads(line) for line in account.read_text().splitlines()]
    assert {row["command"] for row in held} >= {"Step", "read", "write_fast", "Evaluate"}
    whole = 4 * state.outer.slow.numel
    assert max(row["bytes"] for row in held) < 0.5 * 3 * whole * 1.02, held  # half of the weights and of two moments
    assert held[-1]["bytes"] > 0.5 * 3 * whole


@pytest.mark.parametrize(
    ("wish", "environment_says", "expected"),
    [(None, "1", 3), (None, "2", 2), (2, "1", 2)],
    ids=["torchrun's one thread", "the user's threads", "peer.threads"],
)
def test_ranks_share_the_cores(
    wish: int | None, environment_says: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torchrun's one thread a rank, all GPUs waited for one core in the outer step."""
    monkeypatch.setenv("OMP_NUM_THREADS", environment_says)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    before = torch.get_num_threads()
    torch.set_num_threads(int(environment_says))  # as in a process that begins with this environment
    account = tmp_path / "account"
    cold = environment_says != "1"  # a warm process has read its own environment
    try:
        with ranks(2, tmp_path, ("-m", "tests.unit.replica.rank_account", str(account), "cores=6"), cold=cold) as it:
            replica(config(tmp_path, peer={"threads": wish}), it.ranks)
            of_rank_0 = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    held = [json.loads(line) for line in account.read_text().splitlines()]
    assert [of_rank_0, *{row["threads"] for row in held}] == [expected, expected]


def test_a_rank_that_dies_ends_the_peer_in_one_line(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with ranks(3, tmp_path) as it:
        state = replica(settings, it.ranks)
        state.inner.run(state.stream.take(1))
        os.kill(it.processes[1].pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"^rank 2 of this peer has ended, and a part of the weights with it"):
            state.inner.run(state.stream.take(10_000))
        with pytest.raises(RunError, match=r"^rank 2 of this peer has ended"):
            theta(state)
        it.ranks.dismiss(1)
        assert it.processes[0].wait(20) == 1
    assert it.output() == ""
    assert it.gave_up == []


@pytest.mark.parametrize(("left", "words"), [(False, "rank 1 of this peer has ended"), (True, "")])
def test_a_peer_that_hangs_after_the_loss_of_a_rank_is_ended(
    left: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has left the swarm: the end of the process may wait for a thread that waits for the accelerator.
    Its command has said the words by then.
    """
    timers: list[Callable[[], None]] = []

    def timer(seconds: float, call: Callable[..., None], arguments: tuple[Any, ...] = ()) -> Mock:
        return Mock(start=lambda: timers.append(partial(call, *arguments)))

    monkeypatch.setattr("peer.replica.sharded.ranks.threading.Timer", timer)
    said: list[str] = []
    leader = Ranks(launch.Rank(0, 1, free_port()), said.append)
    leader._lose("rank 1 of this peer has ended")
    if left:
        leader.dismiss(1)
    assert said == []
    (end,) = timers
    end()
    assert said == [words]


def test_a_rank_without_memory_says_so_through_rank_0(tmp_path: Path) -> None:
    program = ("-m", "tests.unit.replica.rank_account", str(tmp_path / "account"), "fail")
    with ranks(2, tmp_path, program) as it:
        state = replica(config(tmp_path), it.ranks)
        words = r"^rank 1 of this peer: CUDA out of memory; lower peer.micro_batch \(now the whole batch\)$"
        with pytest.raises(RunError, match=words):
            for _ in range(2):
                state.inner.run(state.stream.take(1))
                theta(state)
    assert it.output() == ""


def test_what_torchrun_says() -> None:
    assert launch.of({}) is None
    assert launch.of({"WORLD_SIZE": "8", "RANK": "0"}) is None  # of another program
    assert launch.of(environment(0, 1, 5)) is None
    assert launch.of(environment(3, 4, 5)) == launch.Rank(3, 4, 5)
    two_machines = {**environment(0, 4, 5), "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(UserError, match="4 ranks on several machines, 2 of them on this one"):
        launch.of(two_machines)
    assert launch.of({**two_machines, "RANK": "1", "LOCAL_RANK": "1"}) is not None  # one line a machine


@pytest.mark.parametrize(("rank", "order"), [(None, ["loads"]), (launch.Rank(0, 2, 5), ["leads", "loads"])])
def test_rank_0_leads_before_it_downloads(
    rank: launch.Rank | None, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others gave up after 300 s. A peer of one rank is told a mistake before torch is imported."""
    done: list[str] = []

    @contextmanager
    def leading(*_: object) -> Iterator[None]:
        done.append("leads")
        yield

    def loading(_: object) -> NoReturn:
        done.append("loads")
        raise UserError("a mistake")

    monkeypatch.setattr(launch, "of", lambda _: rank)
    monkeypatch.setattr("peer.replica.sharded.ranks.leading", leading)
    monkeypatch.setattr(cli, "Signals", lambda _: None)
    with pytest.raises(UserError, match="a mistake"):
        cli._train(argparse.Namespace(load=loading))
    assert done == order


@pytest.mark.parametrize(
    ("size", "gpus", "micro", "words"),
    [
        (5, None, None, "run.batch_size 12 is not a multiple of the 5 ranks"),
        (2, None, 4, "peer.micro_batch 4 does not divide the 6 sequences of a rank"),
        (4, 2, None, "4 ranks for 2 GPUs; use --nproc-per-node 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, size: int, gpus: int | None, micro: int | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        launch.require_fit(config(tmp_path, peer={"micro_batch": micro}), size, gpus)
    launch.require_fit(config(tmp_path, peer={"micro_batch": 3}), 2, 2)
