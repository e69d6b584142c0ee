"""Batches are a function of (seed, stream, position); the splits do not overlap."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from peer.config.data import StdlibData, TextData
from peer.config.schema import EvaluationConfig, RunConfig
from peer.data import corpus
from peer.data.batches import TokenStream
from peer.data.open import validation
from peer.data.sources.text import PIECE_BYTES
from peer.data.tokenizer import Tokens
from peer.errors import UserError

TOKENS = np.arange(1000, dtype=np.uint16)


def stream(number: int = 1, position: int = 0, seed: int = 0) -> TokenStream:
    it = TokenStream(TOKENS, batch_size=4, sequence_length=16, seed=seed, stream=number)
    it.resume(position, None)
    return it


def test_a_batch_depends_on_seed_stream_and_position_only() -> None:
    assert torch.equal(stream().batch(5), stream(position=77).batch(5))
    for other in (stream(2).batch(5), stream().batch(6), stream(seed=1).batch(5)):
        assert not torch.equal(stream().batch(5), other)


def test_resuming_is_an_integer() -> None:
    whole, first = stream(), stream()
    expected = list(whole.take(6))
    begun = list(first.take(2))
    resumed = list(stream(position=first.position).take(4))
    assert all(torch.equal(a, b) for a, b in zip(expected, begun + resumed, strict=True))


def test_a_batch_counts_when_it_is_handed_out() -> None:
    it = stream()
    taken = it.take(10)
    next(taken)
    next(taken)
    assert it.position == 2


def test_a_window_is_a_piece_of_the_text_with_one_token_more_than_the_sequence() -> None:
    batch = stream().batch(0)
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)  # the text counts up, so targets are the next tokens


def test_the_last_token_of_the_text_can_be_reached() -> None:
    short = TokenStream(TOKENS[:18], batch_size=64, sequence_length=16, seed=0, stream=0)
    assert short.batch(0).max() == 17
    assert short.batch(0).min() == 0


def test_validation_batches_are_the_same_for_everybody() -> None:
    run = RunConfig(batch_size=4, data=StdlibData(sequence_length=16), evaluation=EvaluationConfig(batches=3))
    one, two = (validation(run, TOKENS) for _ in range(2))
    assert [batch.shape for batch in one] == [(4, 17)] * 3
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert one[-1].max() == 999


def test_the_standard_library_is_real_text_and_large_enough() -> None:
    text = corpus.load(StdlibData())
    assert len(text.train) > 3_000_000
    assert 0.02 < len(text.validation) / len(text.train) < 0.15
    assert b"import" in bytes(text.validation[text.validation < 256].astype(np.uint8))


def test_local_files_are_split_by_content_that_does_not_overlap(tmp_path: Path) -> None:
    for index in range(200):
        (tmp_path / f"{index:03}.txt").write_text(f"{index:03}\n" * 20)
    text = corpus.load(TextData(name="text", train=(f"{tmp_path}/*.txt",), sequence_length=8))

    def documents(tokens: Tokens) -> set[bytes]:
        words = [bytes(part.astype(np.uint8))[:3] for part in np.split(tokens, np.where(tokens == 256)[0] + 1)]
        return {word for word in words if word}

    train, validation = documents(text.train), documents(text.validation)
    assert train and validation
    assert not train & validation
    assert len(train | validation) == 200


def test_named_validation_files_are_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("b" * 50)
    text = corpus.load(
        TextData(name="text", train=(f"{tmp_path}/a.txt",), validation=(f"{tmp_path}/b.txt",), sequence_length=8)
    )
    assert (len(text.train), len(text.validation)) == (101, 51)


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("hashed", [1, 20])
def test_of_two_files_or_more_some_are_held_out_and_some_are_not(
    count: int, hashed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty files were refused when the hash of none of their names was held out, or that of all."""
    for index in range(count):
        (tmp_path / f"{index}.txt").write_text(str(index) * 20)
    order = {str(index).encode() * 20: bytes([hashed, (index + 1) % count]) for index in range(count)}
    monkeypatch.setattr(corpus.hashlib, "sha256", lambda text: Mock(digest=lambda: order[text]))
    text = corpus.load(TextData(name="text", train=(f"{tmp_path}/*.txt",), sequence_length=8))
    assert bytes(text.validation[:-1].astype(np.uint8)).decode() == str(count - 1) * 20  # the smallest hash
    assert len(text.train) == 21 * (count - 1)


def test_who_has_nothing_to_validate_on_is_not_told_to_shorten_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 500)
    with pytest.raises(UserError, match="the validation split has 0 tokens") as caught:
        corpus.load(TextData(name="text", train=(f"{tmp_path}/*.txt",), sequence_length=8))
    assert "name files to validate on" in str(caught.value) and "lower" not in str(caught.value)


@pytest.mark.parametrize(("content", "says"), [(None, "no file matches"), ("x", "too few for one sequence")])
def test_missing_or_too_little_text_is_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    if content:
        (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        corpus.load(TextData(name="text", train=(f"{tmp_path}/*.txt",)))
    assert "\n" not in str(caught.value)


def test_one_large_file_is_split_too_and_all_of_it_is_used(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100 * PIECE_BYTES, dtype=np.uint8)
    (tmp_path / "book.txt").write_bytes(data.tobytes())
    text = corpus.load(TextData(name="text", train=(f"{tmp_path}/book.txt",)))
    used = len(text.train) + len(text.validation)
    assert used == len(data) + 100  # a separator after every piece
    assert 0 < len(text.validation) < len(text.train) / 5
    assert np.array_equal(np.sort(np.concatenate([text.train, text.validation]))[: len(data)], np.sort(data))


@pytest.mark.parametrize("pattern", ["", "/", "no/**.txt", "~nobody-here/*.txt", "no/[", "no\0where"])
def test_a_pattern_that_cannot_be_one_is_a_line_and_no_traceback(pattern: str) -> None:
    with pytest.raises(UserError, match=r"run\.data\.train") as caught:
        corpus.load(TextData(name="text", train=(pattern,)))
    assert len(str(caught.value).splitlines()) == 1


def test_peers_read_different_places_of_the_text() -> None:
    text = np.arange(60_000, dtype=np.uint16)
    starts: list[set[int]] = []
    for peer in (1, 2):
        mine = TokenStream(text, batch_size=8, sequence_length=16, seed=0, stream=peer)
        starts.append({int(start) for batch in mine.take(20) for start in batch[:, 0]})
    assert len(starts[0] & starts[1]) < 5
    assert all(min(seen) < 6_000 and max(seen) > 54_000 for seen in starts)  # each all over it
