"""The downstream check: its examples are what they claim to be, and its score is what greedy decoding would give."""

from __future__ import annotations

import keyword
from collections.abc import Iterator

import pytest
import torch

from peer import corpus, model
from peer.config import LlamaModel
from peer.config_data import StdlibData
from tests.benchmarks.downstream import DDP, DDP_EARLY, DILOCO, NOLOCO, NOLOCO_ONE, STARTS, figures
from tests.benchmarks.downstream_set import ASK, END, GAP, Task, documents, make, tensors
from tests.benchmarks.downstream_tuning import Tuning, answered, fine_tune, score


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
    return make(text.in_memory, text.validation, learn=300, test=200, seed=0)


def filled(task: Task, part: str) -> list[str]:
    """The lines as they were."""
    return [it.prompt.removesuffix(ASK).replace(GAP, it.answer).decode() for it in getattr(task, part)]


def test_an_example_is_a_line_of_the_library_without_one_keyword(task: Task) -> None:
    assert (len(task.train), len(task.test)) == (300, 200)
    for it in (*task.train, *task.test):
        assert it.prompt.count(GAP) == it.prompt.count(ASK) == 1 and it.prompt.endswith(ASK)
        assert keyword.iskeyword(it.answer.decode()) and len(it.prompt + it.answer) <= 64
    text = corpus.load(StdlibData())
    lines = {line.strip() for file in documents(text.in_memory) for line in file.split("\n")}
    assert set(filled(task, "train")) <= lines
    assert not set(filled(task, "test")) & lines  # pre-training has not seen them
    held_out = {line.strip() for file in documents(text.validation) for line in file.split("\n")}
    assert set(filled(task, "test")) <= held_out
    assert len({*filled(task, "train"), *filled(task, "choice")}) == 800 and 0 < task.common < 0.5


def test_the_loss_is_of_the_answer_alone_and_right_is_what_greedy_decoding_writes(task: Task, one_thread: None) -> None:
    network = model.build(
        LlamaModel(hidden_size=32, intermediate_size=64, layers=1, heads=2), sequence_length=64, seed=0
    )
    some = task.train[:16]
    fine_tune(network, some, Tuning(5e-3, epochs=80), seed=0)
    inputs, targets = tensors(some)
    loss, right = answered(network, inputs, targets)
    assert right.float().mean() > 0.2  # it has learnt some of them by heart
    for index, it in enumerate(some):
        asked = targets[index][targets[index] >= 0]
        assert bytes(asked.tolist()) == it.answer + END
        written = list(it.prompt)
        for _ in asked:
            written.append(int(network(input_ids=torch.tensor([written])).logits[0, -1].argmax()))
        assert (written[len(it.prompt) :] == asked.tolist()) == bool(right[index])
    assert score(network, some).loss == pytest.approx(float(loss.detach().mean()), rel=1e-4)


def test_differences_are_of_the_same_seed() -> None:
    def row(start: str, seed: int, exact: float) -> dict[str, object]:
        same = {"common": 0.2, "learnt": 1, "tested": 1, "val_loss": 1.0, "loss": 1.0}
        return {"start": start, "seed": seed, "exact": exact, **same}

    rows = [row(start, seed, 0.5 + seed / 10) for start in STARTS for seed in range(2)]
    rows = [{**it, "exact": it["exact"] + 0.25} if it["start"] == DDP else it for it in rows]  # type: ignore[operator]
    result = figures(rows)
    assert result["table"][DDP]["exact"] == pytest.approx(0.8) and result["table"][DDP]["exact_spread"] > 0.05
    known = {(DILOCO, DDP): -0.25, (DILOCO, DDP_EARLY): 0.0, (NOLOCO, DILOCO): 0.0, (NOLOCO_ONE, NOLOCO): 0.0}
    for (one, two), expected in known.items():
        found = result["differences"][f"{one} - {two}"]
        assert found["exact"] == pytest.approx(expected) and found["exact_spread"] == pytest.approx(0, abs=1e-9)
