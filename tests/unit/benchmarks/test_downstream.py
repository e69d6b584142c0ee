"""The downstream check: its questions are what they claim to be, and its score is of the answers that it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from peer.config.data import StdlibData
from peer.config.schema import LlamaModel, RunConfig
from peer.data import corpus
from peer.replica import model
from tests.benchmarks.downstream.comparison import DDP, DDP_EARLY, DILOCO, NOLOCO, NOLOCO_ONE, STARTS, figures, jobs
from tests.benchmarks.downstream.questions import ANSWERS, ASK, CHOICE, END, NEAR, Task, documents, make, tensors
from tests.benchmarks.downstream.tuning import Tuning, fine_tune, nats, score


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the benchmark computes: with small matrices two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def task() -> Task:
    text = corpus.load(StdlibData())
    return make(text.in_memory, text.validation, learn=100, test=200, seed=0)


def small() -> nn.Module:
    settings = LlamaModel(hidden_size=32, intermediate_size=64, layers=1, heads=2)
    return model.build(RunConfig(model=settings))


def test_a_question_is_of_one_file_and_its_right_answer_goes_on_where_it_ends(task: Task) -> None:
    assert (len(task.train), len(task.choice), len(task.test)) == (100, CHOICE, 200)
    text = corpus.load(StdlibData())
    sides = {"train": documents(text.in_memory), "test": documents(text.validation)}
    seen = {line.strip() for file in sides["train"] for line in file.split("\n")}
    for side, files in sides.items():
        for it in getattr(task, side)[:40]:
            before = it.prompt.removesuffix(ASK).decode()
            right, *others = (answer.decode() for answer in it.answers)
            home = [file for file in files if before + right + "\n" in file]
            assert home and any(all(f"{other}\n" in file for other in others) for file in home)
            assert side == "train" or (before + right).rpartition("\n")[2].strip() not in seen


def test_answers_differ_and_are_as_long_as_the_right_one(task: Task) -> None:
    for it in (*task.train, *task.choice, *task.test):
        assert len(set(it.answers)) == ANSWERS and it.prompt.endswith(ASK)
        assert all(abs(len(answer) - len(it.answers[0])) <= NEAR for answer in it.answers)
        assert max(len(it.prompt + answer + END) for answer in it.answers) <= 64
    prompts = [it.prompt for it in (*task.train, *task.choice)]
    assert len(set(prompts)) == len(prompts)


def test_the_loss_is_of_the_answer_alone(task: Task, one_thread: None) -> None:
    network, it = small(), task.train[0]
    found = nats(network, *tensors([(it.prompt, answer) for answer in it.answers])).detach()
    for answer, loss in zip(it.answers, found, strict=True):
        logits = network(input_ids=torch.tensor([list(it.prompt + answer)])).logits[0].detach()
        expected = functional.cross_entropy(logits[len(it.prompt) - 1 :], torch.tensor(list(answer + END)))
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)


def test_what_is_learnt_by_heart_is_right_and_a_model_that_knows_nothing_is_not(task: Task, one_thread: None) -> None:
    network, some = small(), task.train[:32]
    assert score(network, task.test).right < 0.45
    fine_tune(network, some, Tuning(1e-2, epochs=60), seed=0)
    assert score(network, some).right > 0.9
    swapped = [replace(it, answers=(it.answers[1], it.answers[0], *it.answers[2:])) for it in some]
    assert score(network, swapped).right < 0.1


def test_every_start_is_made_once_a_seed() -> None:
    keys = [job.key for job in jobs((0, 1), quick=False)]
    assert len(set(keys)) == len(keys) == 2 * (len(STARTS) - 1)  # one replica and the average are of one pre-training


def test_differences_are_of_the_same_seed() -> None:
    def row(start: str, seed: int, right: float) -> dict[str, object]:
        same = {"learnt": 1, "tested": 1, "val_loss": 1.0, "before": 0.2, "loss": 1.0}
        return {"start": start, "seed": seed, "right": right, **same}

    rows = [row(start, seed, 0.5 + seed / 10) for start in STARTS for seed in range(2)]
    rows = [{**it, "right": it["right"] + 0.25} if it["start"] == DDP else it for it in rows]  # type: ignore[operator]
    result = figures(rows)
    assert result["table"][DDP]["right"] == pytest.approx(0.8) and result["table"][DDP]["right_spread"] > 0.05
    known = {(DILOCO, DDP): -0.25, (DILOCO, DDP_EARLY): 0.0, (NOLOCO, DILOCO): 0.0, (NOLOCO_ONE, NOLOCO): 0.0}
    for (one, two), expected in known.items():
        found = result["differences"][f"{one} - {two}"]
        assert found["right"] == pytest.approx(expected) and found["right_spread"] == pytest.approx(0, abs=1e-9)
