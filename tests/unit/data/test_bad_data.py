"""Bad data is one line that names file and row, in the thread that trains, and nothing is trained on it."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.config.data import AnyData, C4Data, HuggingFaceData, JsonlData, ParquetData, TextData, TokenizerConfig
from peer.config.schema import RunConfig
from peer.data import corpus, prefetch
from peer.data.batches import TokenStream
from peer.data.open import read_ahead
from peer.data.prefetch import Prefetched
from peer.data.sources.source import size
from peer.data.sources.stream import DocumentStream
from peer.errors import UNREACHED, RunError, UserError
from tests.unit.data.harness import BATCH, LENGTH, bpe, jsonl, padded, source, stream, texts
from tests.unit.parts import TEXT

BYTES = TokenizerConfig()
ROWS = [{"text": text} for text in texts(300)]
SAME: dict[str, Any] = {"sequence_length": LENGTH, "shuffle": 8}


def lines(folder: Path) -> JsonlData:
    """Validation of its own, so that opening alone does not read what is broken."""
    jsonl(folder / "good.jsonl", ROWS[:50])
    return JsonlData(name="jsonl", train=(f"{folder}/bad.*",), validation=(f"{folder}/good.jsonl",), **SAME)


def said(settings: AnyData, count: int = 500) -> str:
    """The one line that reading ``settings`` ends with, in the background as a peer reads."""
    with pytest.raises(UserError) as caught:
        ahead = Prefetched(stream(settings), pin=False)
        try:
            list(ahead.take(count))
        finally:
            ahead.close()
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"body": "x", "url": "y"}, "row 201: has no 'text' (run.data.column), only: body, url"),
        ({"text": 5}, "row 201: is of type int, neither a text nor a list of token ids"),
        ({"text": None}, "row 201: is empty, neither"),
        ({"text": ["a", "b"]}, "row 201: is of type list, neither"),
        ({"text": [1.5]}, "row 201: is of type list, neither"),
        ({"text": [[1], [2, 3]]}, "row 201: is of type list, neither"),
        ({"text": [1, 2], "attention_mask": [[1], [1, 1]]}, "row 201: attention_mask is not 2 times 0 or 1"),
        ({"text": [1, 2, 257]}, "row 201: has the token id 257, run.data.tokenizer.vocabulary is 257"),
        ({"text": [1, -1]}, "row 201: has the token id -1"),
        ({"text": [2**70]}, "row 201: is of type list, neither"),
        ({"text": [1, 2], "attention_mask": [1]}, "row 201: attention_mask is not 2 times 0 or 1"),
        ({"text": [1, 2], "attention_mask": [1, 2]}, "row 201: attention_mask is not 2 times 0 or 1"),
        ({"text": "\ud800"}, "row 201: is not a text that UTF-8 can hold"),
        ([1, 2], "row 201: is not a JSON object"),
        ("text", "row 201: is not a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["bad.jsonl", "bad.jsonl.gz"])
def test_a_bad_row_is_named(name: str, row: object, says: str, tmp_path: Path) -> None:
    settings = lines(tmp_path)
    whole = "".join(json.dumps(it) + "\n" for it in [*ROWS[:200], row, *ROWS[200:]]).encode()
    (tmp_path / name).write_bytes(gzip.compress(whole) if name.endswith("gz") else whole)
    assert f"{name} {says}" in said(settings)


def test_a_line_that_is_no_json_and_one_without_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peer.data.sources import jsonl as module

    settings = lines(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": "cut')
    assert 'bad.jsonl row 2: is not JSON: b\'{"text": "cut\'' in said(settings)
    monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "' + b"a" * 2000)
    assert "is this JSON Lines?" in said(settings)


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip", "checksum"])
def test_of_a_broken_gzip_nothing_is_used(damage: str, tmp_path: Path) -> None:
    settings = lines(tmp_path)
    path = jsonl(tmp_path / "bad.jsonl.gz", ROWS)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "no gzip":
        data[0] = 0
    else:
        data[-6 if damage == "checksum" else len(data) // 2] ^= 255
    path.write_bytes(data)
    ahead = Prefetched(stream(settings), pin=False)
    taken: list[torch.Tensor] = []
    with pytest.raises(UserError, match=r"bad\.jsonl\.gz row \d+: broken gzip: .*; nothing of the file was used"):
        taken.extend(ahead.take(10))
    ahead.close()
    assert not taken


def text_of(folder: Path, tokenizer: Any) -> TextData:
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("\n".join(texts(50, name)))
    return TextData(name="text", train=(f"{folder}/*.txt",), sequence_length=LENGTH, tokenizer=tokenizer)


def failing(number: int) -> Any:
    def read(*arguments: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return read


@pytest.mark.parametrize("call", ["read", "stat", "glob"])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "parquet text", "text", "text of tokens"])
def test_a_file_server_that_is_away_may_come_back(
    kind: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read of a mounted folder that failed was bad data, of a .gz even a broken one: exit code 2, for a service the
    end. What this user may not read stays it.
    """
    if kind.startswith("text"):
        settings: AnyData = text_of(tmp_path, bpe(tmp_path / "small") if kind == "text of tokens" else BYTES)
    else:
        settings = source(kind, tmp_path)
    opened = stream(settings)  # before the server goes

    def fails(number: int, expected: type[Exception], says: str) -> None:
        with monkeypatch.context() as patch:
            if call == "read":
                for owner, name in ((Path, "open"), (Path, "read_bytes"), (gzip, "open"), (pq, "ParquetFile")):
                    patch.setattr(owner, name, failing(number))
            else:
                patch.setattr(Path, call, failing(number))
            with pytest.raises(expected, match=says) as caught:
                corpus.load(settings)
            assert "broken gzip" not in str(caught.value)
            if call == "read" and isinstance(opened, DocumentStream):
                with pytest.raises(expected, match=says):
                    next(opened._split.source.rows(0, 0, lambda row: True))

    for number in UNREACHED:
        fails(number, RunError, rf"^.*{os.strerror(number)}; start again to go on$")
    fails(errno.EACCES, UserError, "Permission denied")
    assert corpus.load(settings)


def test_a_range_far_inside_a_file_that_cannot_be_read_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To name the row, the file was read again from its beginning."""
    from peer.data.sources import jsonl as module

    monkeypatch.setattr(module, "RANGE_BYTES", 1000)
    rows = module.JsonLines([jsonl(tmp_path / "a.jsonl", ROWS)], ("text",))
    monkeypatch.setattr(Path, "open", failing(errno.EIO))
    with pytest.raises(RunError, match=r"a\.jsonl: cannot be read: Input/output error; start again to go on$"):
        next(rows.rows(3, 0, lambda row: True))


def test_a_folder_without_its_file_server_is_no_wrong_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on glob finds nothing there, and raises nothing."""
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
    monkeypatch.setattr(Path, "stat", failing(errno.ENOTCONN))
    with pytest.raises(RunError, match=r"^run\.data\.train: cannot read .*; start again to go on$"):
        corpus.load(JsonlData(name="jsonl", train=(f"{tmp_path}/*.jsonl",), **SAME))
    with pytest.raises(RunError, match=r"start again to go on$"):
        size(tmp_path)


def test_empty_files_and_data_without_text_are_named(tmp_path: Path) -> None:
    settings = lines(tmp_path)
    (tmp_path / "bad.jsonl").touch()
    assert re.search(r"bad\.jsonl is empty; remove it", said(settings))
    (tmp_path / "bad.jsonl").unlink()
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b""))
    assert re.search(r"bad\.jsonl\.gz has no rows; remove it", said(settings))
    jsonl(tmp_path / "bad.jsonl.gz", ["", ""])
    assert "have no text in them" in said(settings)


def test_less_than_a_batch_is_said_with_both_numbers(tmp_path: Path) -> None:
    settings = lines(tmp_path)
    jsonl(tmp_path / "bad.jsonl", ["a" * 20, "b" * 20])
    assert "have 42 tokens" in said(settings) and "less than one batch of 65" in said(settings)
    jsonl(tmp_path / "bad.jsonl", ["a" * 40, "b" * 40])
    assert len(list(stream(settings).take(5))) == 5  # more than a batch: it is read again and again


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": ["a"] * 9}, "has no column input_ids (run.data.column), only: text"),
        ({"input_ids": [[1]] * 8 + [[300]]}, "row 9: has the token id 300"),
        ({"input_ids": [[1]] * 8 + [None]}, "row 9: is empty, neither"),
        ({"input_ids": [[1, 2]] * 8 + [[1, None]]}, "row 9: is of type list, neither"),
        ({"input_ids": [1.5] * 9}, ": is of type float, neither"),
        ({"input_ids": [[1, 2]] * 9, "attention_mask": [[1, 1]] * 8 + [[1]]}, "row 9: attention_mask is not 2 times"),
        ({"input_ids": pa.array([], pa.list_(pa.int32()))}, "has no rows"),
    ],
)
def test_parquet_that_is_no_good_is_named(columns: dict[str, Any], says: str, tmp_path: Path) -> None:
    padded(tmp_path / "good.parquet", texts(50))
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet", row_group_size=4)
    good, bad = f"{tmp_path}/good.parquet", f"{tmp_path}/bad.parquet"
    told = said(ParquetData(name="parquet", train=(bad,), validation=(good,), **SAME))
    assert "bad.parquet" in told and says in told


def test_parquet_that_is_damaged_is_named(tmp_path: Path) -> None:
    from peer.commands import tokenize

    jsonl(tmp_path / "a.jsonl", texts(500))
    tokenize.run([f"{tmp_path}/a.jsonl"], tmp_path, "bytes", end=None, column="text", say=lambda line: None)
    path = next(tmp_path.glob("*.parquet"))
    data = bytearray(path.read_bytes())
    settings = ParquetData(name="parquet", train=(str(path),), **SAME)
    for damaged in (data[:200], bytearray(b"PAR1") + bytes(100)):
        path.write_bytes(damaged)
        assert "is not Parquet that can be read" in said(settings)
    data[len(data) // 4] ^= 255
    path.write_bytes(data)
    assert "cannot be read" in said(settings)  # by the pages' checksums


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (C4Data(name="c4", folder=Path("/nowhere"), **SAME), "run.data.folder: no file matches /nowhere/c4-train"),
        (HuggingFaceData(name="huggingface", path="/nowhere/set", **SAME), "run.data.path: cannot load /nowhere/set"),
        (JsonlData(name="jsonl", train=("/nowhere/*",), **SAME), "run.data.train: no file matches /nowhere/*"),
        (ParquetData(name="parquet", train=("/nowhere/*",), **SAME), "run.data.train: no file matches /nowhere/*"),
    ],
)
def test_what_is_not_there_is_named(settings: AnyData, says: str) -> None:
    assert says in said(settings)


def test_a_data_set_without_the_split_or_the_column_is_a_line(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"body": texts(200)})}).save_to_disk(tmp_path / "set")
    settings = HuggingFaceData(name="huggingface", path=str(tmp_path / "set"), **SAME)
    assert "has no 'text', only: body" in said(settings)
    assert "run.data.split" in said(settings.model_copy(update={"split": "test"}))
    assert "run.data.split" in said(settings.model_copy(update={"validation_split": "dev", "column": "body"}))


def test_a_saved_set_without_splits_has_no_split_to_choose(tmp_path: Path) -> None:
    """Its split was ignored, so the validation rows were the training rows."""
    import datasets

    for name, named in (("plain", None), ("named", "dev")):
        kept = datasets.Dataset.from_dict({"text": texts(700)}, split=named)
        kept.save_to_disk(tmp_path / name)
        settings = HuggingFaceData(name="huggingface", path=str(tmp_path / name), **SAME)
        assert "run.data.validation_split: " in said(settings.model_copy(update={"validation_split": "validation"}))
        assert "no splits, so no 'test'; leave it out" in said(settings.model_copy(update={"split": "test"}))
        assert len(corpus.load(settings).validation)
    assert len(corpus.load(settings.model_copy(update={"split": "dev"})).validation)


def test_further_validation_sets_are_of_one_kind_and_there(tmp_path: Path) -> None:
    settings = lines(tmp_path)
    jsonl(tmp_path / "bad.jsonl", ROWS)
    (tmp_path / "few.txt").write_text("few")
    for patterns, says in (
        (("/nowhere/*",), "run.evaluation.sets.more: no file matches"),
        ((f"{tmp_path}/good.jsonl", f"{tmp_path}/few.txt"), "different kinds (JSON Lines, text)"),
        ((f"{tmp_path}/few.txt",), "the run.evaluation.sets.more split has 4 tokens"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            corpus.load(settings, {"more": patterns})


def test_a_further_validation_set_may_have_the_column_of_the_training_data_or_text(tmp_path: Path) -> None:
    for name, column in (("bad", "body"), ("good", "body"), ("other", "text")):
        jsonl(tmp_path / f"{name}.jsonl", [{column: row["text"]} for row in ROWS[:50]])
    settings = lines(tmp_path).model_copy(update={"column": "body"})
    jsonl(tmp_path / "good.jsonl", [{"body": row["text"]} for row in ROWS[:50]])
    others = corpus.load(settings, {name: (f"{tmp_path}/{name}.jsonl",) for name in ("good", "other")}).others
    assert others["good"].tolist() == others["other"].tolist()


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=30) | st.just(b'{"text": "it"}'), max_size=6))
def test_whatever_a_file_has_in_it_is_read_or_refused_in_a_line(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "bad.jsonl").write_bytes(b"\n".join(rows))
    try:
        taken = list(stream(lines(folder)).take(3))
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert all(b'"text"' in row for row in rows if row.strip()) and len(taken) == 3


class Failing(TokenStream):
    """Reading fails for a reason that nobody thought of; or it never ends."""

    def take(self, count: int) -> Iterator[torch.Tensor]:
        for batch in super().take(count):
            if self.position == 4:
                raise ZeroDivisionError("of all things")
            yield batch


def test_the_unexpected_is_a_line_too_after_the_batches_before_it() -> None:
    ahead = Prefetched(Failing(TEXT, batch_size=2, sequence_length=LENGTH, seed=0, stream=0), pin=False)
    taken: list[torch.Tensor] = []
    with pytest.raises(RunError, match=r"run\.data: ZeroDivisionError: of all things"):
        for batch in ahead.take(10):
            taken.append(batch)
    assert len(taken) == ahead.position == 3
    with pytest.raises(RunError, match=r"run\.data: ZeroDivisionError: of all things"):
        list(ahead.take(1))
    ahead.close()


class Waiting(TokenStream):
    """No batch comes before ``over``, and then an error of the source's own."""

    over = threading.Event()

    def take(self, count: int) -> Iterator[torch.Tensor]:
        self.over.wait(60.0)
        raise TimeoutError("of the source")


def test_a_batch_that_does_not_come_is_said_otherwise_than_a_timeout_of_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = Prefetched(Waiting(TEXT, batch_size=2, sequence_length=LENGTH, seed=0, stream=0), pin=False)
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"run\.data: no row was read in 0 s; does the"):
        patch.setattr(prefetch, "DATA_SILENCE", 0.1)
        patch.setattr(prefetch, "LOOK", 0.01)
        next(ahead.take(1))
    Waiting.over.set()
    with pytest.raises(RunError, match=r"run\.data: TimeoutError: of the source"):
        next(ahead.take(1))
    ahead.close()


class Skipping(TokenStream):
    """No batch comes before ``here``: it reads the rows before the place of a resume, one at each look at them."""

    def __init__(self) -> None:
        super().__init__(TEXT, batch_size=2, sequence_length=LENGTH, seed=0, stream=0)
        self.here, self.rows = threading.Event(), 0

    def passed(self) -> int:
        self.rows += 1
        if self.rows == 50:
            self.here.set()
        return self.rows

    def take(self, count: int) -> Iterator[torch.Tensor]:
        self.here.wait()
        yield from super().take(count)


def test_a_resume_far_inside_a_large_file_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the time of one batch, so that on a slow line each restart ended in the same error."""
    monkeypatch.setattr(prefetch, "DATA_SILENCE", 0.01)
    monkeypatch.setattr(prefetch, "LOOK", 0.002)
    stream = Skipping()
    ahead = Prefetched(stream, pin=False, passed=stream.passed)
    assert torch.equal(next(ahead.take(1)), stream.batch(0))
    ahead.close()


def test_a_stop_ends_the_wait_for_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "LOOK", 0.002)
    stream = Skipping()
    ahead = Prefetched(stream, pin=False, passed=stream.passed, away=lambda: 10 < stream.rows < 20)
    assert list(ahead.take(3)) == [] and ahead.position == 0
    stream.rows = 40  # it was a pause
    assert [it.tolist() for it in ahead.take(3)] == [stream.batch(index).tolist() for index in range(3)]
    ahead.close()


@pytest.mark.parametrize("kind", ["jsonl.gz", "streaming", "parquet", "parquet text"])
def test_a_source_counts_the_rows_that_a_resume_skips(kind: str, tmp_path: Path) -> None:
    settings = source(kind, tmp_path)
    reading = stream(settings)
    ahead = read_ahead(RunConfig(batch_size=BATCH, data=settings), reading, torch.device("cpu"))
    assert isinstance(reading, DocumentStream) and isinstance(ahead, Prefetched)
    rows, before = reading._split.source.rows(0, 25, lambda row: True), ahead._passed()
    assert next(rows)[0] == 25
    assert ahead._passed() - before >= (25 if not kind.startswith("parquet") else 0)
    list(rows)
    assert ahead._passed() - before >= 30
    ahead.close()


def test_closing_ends_the_thread_while_its_queue_is_full() -> None:
    ahead = Prefetched(TokenStream(TEXT, batch_size=2, sequence_length=LENGTH, seed=0, stream=0), pin=False, depth=1)
    list(ahead.take(2))
    time.sleep(0.3)
    assert [it for it in threading.enumerate() if it.name == "data"]
    ahead.close()
    assert not [it for it in threading.enumerate() if it.name == "data"]
    ahead.close()
