"""What is validated on of data that is not in memory: as many tokens as an evaluation uses, of every file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peer.config.schema import EvaluationConfig, RunConfig
from peer.data import corpus
from peer.data.open import corpus_of, validation
from peer.data.sources import jsonl as module
from peer.data.tokenizer import SEPARATOR, Tokens
from tests.unit.data.harness import bpe, jsonl, source, texts


def run_of(folder: Path, ending: str, batch_size: int = 1) -> RunConfig:
    """Trains on one file, and validates on all v*, also as a further set. An evaluation uses 100 tokens a sequence."""
    jsonl(folder / "train.jsonl", texts(50))
    files = (f"{folder}/v*.{ending}",)
    data = {"name": "jsonl", "train": [f"{folder}/train.jsonl"], "validation": files, "sequence_length": 50}
    if ending == "parquet":
        pq.write_table(pa.table({"text": texts(50)}), folder / "train.parquet")
        data |= {"name": "parquet", "train": [f"{folder}/train.parquet"], "column": "text"}
    settings = EvaluationConfig(batches=2, sets={"more": files})
    return RunConfig.model_validate({"data": data, "evaluation": settings, "batch_size": batch_size})


def files(folder: Path, ending: str = "jsonl", **documents: int) -> None:
    """A file for each letter, with so many documents of 10 tokens: nine times the letter, and the end."""
    for letter, count in documents.items():
        if ending == "parquet":
            pq.write_table(pa.table({"text": [letter * 9] * count}), folder / f"v{letter}.parquet", row_group_size=7)
        else:
            jsonl(folder / f"v{letter}.{ending}", [letter * 9] * count)


def said(tokens: Tokens) -> str:
    return "".join("|" if token == SEPARATOR else chr(token) for token in tokens)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_every_file_is_validated_on_and_what_a_short_one_lacks_another_has(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two large files the second was never evaluated. Peers may have the same files in other formats."""
    monkeypatch.setattr(corpus, "VALIDATION_TOKENS", 300)
    monkeypatch.setattr(module, "RANGE_BYTES", 200)
    files(tmp_path, ending, a=2, b=400, c=11, d=400)
    a, b, c, d = (9 * letter + "|" for letter in "abcd")
    found = corpus_of(run_of(tmp_path, ending))
    # A document that is cut has an end too.
    assert said(found.validation) == 2 * a + 13 * b + 7 * c + "cccc|" + 7 * d + "dddd|"
    assert np.array_equal(found.validation, found.others["more"])


def test_all_is_validated_on_if_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "VALIDATION_TOKENS", 1000)
    files(tmp_path, a=1, b=60, c=30)
    assert said(corpus_of(run_of(tmp_path, "jsonl")).validation) == "".join(
        count * (9 * letter + "|") for letter, count in (("a", 1), ("b", 60), ("c", 30))
    )


@pytest.mark.parametrize(("batch_size", "largest", "tokens"), [(1, 5000, 300), (20, 5000, 2002), (20, 1000, 1000)])
def test_there_are_as_many_tokens_as_an_evaluation_uses_within_bounds(
    batch_size: int, largest: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "VALIDATION_TOKENS", 300)
    monkeypatch.setattr(corpus, "LARGEST_VALIDATION", largest)
    files(tmp_path, a=400, b=400)
    run = run_of(tmp_path, "jsonl", batch_size)
    found = corpus_of(run)
    assert [len(found.validation), len(found.others["more"])] == [tokens, tokens]
    windows = [tuple(row) for batch in validation(run, found.validation) for row in batch.tolist()]
    assert len(windows) == 2 * batch_size
    assert {min(said(np.array(row))) for row in windows} == {"a", "b"}


def test_of_held_out_rows_the_first_ones_are_taken_as_many_as_an_evaluation_uses_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "VALIDATION_TOKENS", 20)
    settings = source("jsonl", tmp_path, texts(4000))
    whole = corpus.load(settings, needed=10**6).validation
    assert len(whole) > 600
    for needed, largest, tokens in ((0, 500, 20), (300, 500, 300), (600, 500, 500)):
        monkeypatch.setattr(corpus, "LARGEST_HELD_OUT", largest)
        found = corpus.load(settings, needed=needed).validation
        assert len(found) == tokens and np.array_equal(found[:-1], whole[: tokens - 1])


def test_little_more_is_tokenised_than_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a text file has 64 KiB: to tokenise 64 of each of many files takes minutes."""
    from peer.data.tokenizer import HuggingFace

    own = bpe(tmp_path / "small")
    monkeypatch.setattr(corpus, "VALIDATION_TOKENS", 300)
    files(tmp_path, a=400, b=400, c=400)
    run = run_of(tmp_path, "jsonl")
    run = run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": own})})
    encoded: list[int] = []
    plain = HuggingFace.encode
    monkeypatch.setattr(HuggingFace, "encode", lambda self, texts: encoded.append(len(texts)) or plain(self, texts))
    assert len(corpus_of(run).validation) == 300
    assert sum(encoded) < 150  # of two sets of three files
