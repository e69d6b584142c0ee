"""Every source gives every token once an epoch, in an order of each peer's own, and goes on exactly where it was."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.config.data import AnyData, HuggingFaceData, JsonlData
from peer.data import corpus
from peer.data.prefetch import Prefetched
from peer.data.sources import huggingface
from peer.data.sources.documents import DataPosition, Split
from peer.data.tokenizer import SEPARATOR, Bytes
from peer.errors import UserError
from tests.unit.data.harness import BATCH, KINDS, LENGTH, jsonl, padded, source, stream, texts


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_who_does_not_use_them_does_not_wait_for_datasets_and_pyarrow() -> None:
    """The libraries take seconds to import."""
    code = (
        "import sys; from peer.data import corpus; from peer.training import assemble; "
        "from peer.config.schema import Config; "
        "corpus.load(Config().run.data); assert not {'datasets', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_is_bit_equal(kind: str, tmp_path: Path) -> None:
    settings = source(kind, tmp_path)
    expected = list(stream(settings, 7, batch_size=8).take(300))  # more than an epoch
    for taken in (0, 1, 3, 40, 199):
        first = stream(settings, 7, batch_size=8)
        begun = list(first.take(taken))
        saved = json.loads(json.dumps([first.position, first.cursor]))
        second = stream(settings, 7, batch_size=8)
        second.resume(*saved)
        rest = list(second.take(300 - taken))
        assert second.position == 300
        assert all(torch.equal(a, b) for a, b in zip(expected, begun + rest, strict=True)), taken


@pytest.mark.parametrize("kind", ["jsonl.gz", "streaming"])
def test_a_stream_that_is_read_ahead_is_the_same_and_resumes_from_what_was_handed_out(
    kind: str, tmp_path: Path
) -> None:
    settings = source(kind, tmp_path)
    expected = list(stream(settings, 7).take(60))
    first = Prefetched(stream(settings, 7), pin=False)
    begun = list(first.take(17))
    saved = json.loads(json.dumps([first.position, first.cursor]))
    first.close()
    second = Prefetched(stream(settings, 7), pin=False)
    list(second.take(3))
    second.resume(*saved)
    rest = list(second.take(43))
    second.close()
    assert all(torch.equal(a, b) for a, b in zip(expected, begun + rest, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_comes_once_an_epoch_whole_and_with_its_end_token(kind: str, tmp_path: Path) -> None:
    rows = texts(1000)
    text = corpus.load(source(kind, tmp_path, rows))
    split = text.train
    assert isinstance(split, Split)
    seen: Counter[str] = Counter()
    for place, tokens in split.documents(DataPosition(), seed=0, stream=3):
        if place.epoch == 2:
            break
        assert tokens[-1] == SEPARATOR and (tokens[:-1] < 256).all()
        seen[bytes(tokens[:-1].astype(np.uint8)).decode()] += 1
    assert set(seen.values()) == {2}
    assert set(seen) <= set(rows)
    validation = np.split(text.validation, np.where(text.validation == SEPARATOR)[0] + 1)
    held_out = {bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in validation if len(tokens)}
    if kind == "c4":  # it has validation files of its own, and others without them validate on one row in 100
        assert held_out == set(texts(50, "v"))
        assert 3 <= len(set(rows) - set(seen)) <= 20
    else:
        assert set(seen) | held_out == set(rows)
        assert not set(seen) & held_out
        assert len(held_out) >= 3


def test_windows_are_the_text_and_overlap_by_the_one_token_that_is_shifted(tmp_path: Path) -> None:
    """Labels are shifted once, by the loss: the targets of all windows are the text, each token of it once."""
    settings = source(
        "jsonl", tmp_path, [f"{index:03d}" + chr(97 + index % 26) * 47 for index in range(400)], shuffle=1
    )
    whole = corpus.load(settings).train
    assert isinstance(whole, Split)
    documents = [
        tokens for (place, tokens), _ in zip(whole.documents(DataPosition(), seed=0, stream=0), range(60), strict=False)
    ]
    text = np.concatenate(documents).astype(np.int64)
    windows = np.concatenate([batch.numpy() for batch in stream(settings, batch_size=1).take(100)])
    assert windows.shape == (100, LENGTH + 1)
    assert np.array_equal(windows[:, 1:].ravel(), text[1 : 1 + 100 * LENGTH])
    assert np.array_equal(windows[:, :-1].ravel(), text[: 100 * LENGTH])


def test_a_block_is_mixed_and_nothing_is_lost_by_it(tmp_path: Path) -> None:
    plain = source("jsonl", tmp_path, shuffle=1)
    mixed = plain.model_copy(update={"shuffle": 40})
    in_order = [tuple(row) for batch in stream(plain).take(20) for row in batch.tolist()]
    drawn = [tuple(row) for batch in stream(mixed).take(20) for row in batch.tolist()]
    for block in range(2):
        part = slice(block * 40, block * 40 + 40)
        assert Counter(in_order[part]) == Counter(drawn[part])
        assert in_order[part] != drawn[part]
    other = [tuple(row) for batch in stream(mixed, seed=1).take(10) for row in batch.tolist()]
    assert other != drawn[:40]


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "disk"])
def test_two_peers_read_as_much_in_common_as_two_independent_drawings(kind: str, tmp_path: Path) -> None:
    split = corpus.load(source(kind, tmp_path, texts(3000))).train
    assert isinstance(split, Split)
    share, common = 0.2, []
    for pair in range(10):
        seen: list[set[bytes]] = []
        for number in (2 * pair, 2 * pair + 1):
            documents = split.documents(DataPosition(), seed=5, stream=number)
            seen.append({next(documents)[1].tobytes() for _ in range(int(3000 * share))})
        common.append(len(seen[0] & seen[1]) / 3000)
    assert np.mean(common) == pytest.approx(share**2, rel=0.35)


def test_a_file_in_ranges_has_every_row_once_whatever_the_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer.data.sources import jsonl as module

    rows = texts(200)
    path = jsonl(tmp_path / "a.jsonl", rows)
    for size in (1, 7, 64, 1000, 10**6):
        monkeypatch.setattr(module, "RANGE_BYTES", size)
        whole = module.JsonLines([path], ("text",))
        found = [
            (whole.position_text(shard, row), document)
            for shard in range(len(whole.names))
            for row, document in whole.rows(shard, 0, lambda row: True)
        ]
        assert [document for _, document in found] == rows
        if size > 1:
            assert [place for place, _ in found[::40]] == [f"{path} row {1 + index}" for index in range(0, 200, 40)]


def test_with_other_files_a_stream_begins_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = source("jsonl", tmp_path)
    first = stream(settings)
    list(first.take(5))
    jsonl(tmp_path / "more.jsonl", texts(tag="n"))
    second = stream(settings)
    second.resume(first.position, first.cursor)
    assert len(list(second.take(3))) == 3
    assert second.position == 8


def test_padding_is_dropped_and_an_end_token_is_not_doubled(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    padded(tmp_path / "a.parquet", ["one", "two"], width=9)
    columns = {"input_ids": [[104, 105, 256, 7]], "attention_mask": [[1, 1, 1, 0]]}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    found = corpus.opening.files([f"{tmp_path}/*.parquet"], "x", corpus.Bytes(), "text").heads(100)
    assert found.tolist() == [*b"one", 256, *b"two", 256, *b"hi", 256]


@pytest.mark.parametrize("batch_size", [1, BATCH])
def test_the_random_state_of_the_process_does_not_matter(batch_size: int, tmp_path: Path) -> None:
    settings = source("jsonl", tmp_path)
    one = list(stream(settings, batch_size=batch_size).take(5))
    np.random.seed(5)
    torch.manual_seed(5)
    two = list(stream(settings, batch_size=batch_size).take(5))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_single_file_gives_each_peer_another_part_of_it_first(tmp_path: Path) -> None:
    jsonl(tmp_path / "all.jsonl.gz", texts(2000))
    settings = JsonlData(name="jsonl", train=(f"{tmp_path}/all.jsonl.gz",), sequence_length=LENGTH, shuffle=4)
    firsts = {bytes(next(iter(stream(settings, number).take(1))).numpy().tobytes()) for number in range(12)}
    assert len(firsts) >= 11


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("kind", "columns"), [("torch", None), ("arrow", ["url"])])
def test_a_saved_set_may_have_a_format_of_its_own(
    kind: str, columns: list[str] | None, streaming: bool, tmp_path: Path
) -> None:
    """Tensors were refused."""
    import datasets

    rows = {"input_ids": [[index % 200, 2, 3] for index in range(700)], "url": ["u"] * 700}
    datasets.Dataset.from_dict(rows).with_format(kind, columns=columns).save_to_disk(tmp_path / "set")
    path, column = str(tmp_path / "set"), "input_ids"
    whole = huggingface.load(
        HuggingFaceData(name="huggingface", path=path, column=column, streaming=streaming), "train"
    )
    assert [ids.tolist() for _, ids in whole.rows(0, 1, lambda row: row < 3)] == [[1, 2, 3], [2, 2, 3]]  # type: ignore[union-attr]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_path_of_a_data_set_may_be_one_file_of_it(streaming: bool, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", texts(50))
    jsonl(tmp_path / "b.jsonl", texts(50, "b"))
    settings = HuggingFaceData(name="huggingface", path=f"{tmp_path}/a.jsonl", streaming=streaming)
    whole = huggingface.load(settings, "train")
    assert [row for shard in range(len(whole.names)) for _, row in whole.rows(shard, 0, lambda row: True)] == texts(50)


@pytest.mark.parametrize("kind", ["disk", "streaming"])
def test_in_a_set_of_the_hub_a_row_without_a_text_is_skipped_as_an_empty_one_is(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One null ended every peer, again after each restart, and who trains on it cannot mend the set."""

    def kept(name: str, *without: Any, every: int = 9) -> AnyData:
        (tmp_path / name).mkdir()
        rows: list[Any] = texts()
        rows[::every] = without * len(rows[::every])
        return source(kind, tmp_path / name, rows)

    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)  # logs.setup of another test turns it off
    huggingface._warn_of_null.cache_clear()
    null = None if kind == "disk" else {"text": None}
    expected, settings = list(stream(kept("empty", ""), 7).take(300)), kept("null", null)
    for taken in (0, 1, 40, 199):
        first = stream(settings, 7)
        begun = list(first.take(taken))
        second = stream(settings, 7)
        second.resume(*json.loads(json.dumps([first.position, first.cursor])))
        rest = list(second.take(300 - taken))
        assert all(torch.equal(a, b) for a, b in zip(expected, begun + rest, strict=True)), taken
    assert caplog.text.count("has no text (null); it is skipped") == 1
    nothing = kept("nothing", null, every=1)
    with pytest.raises(UserError, match="the validation split has 0 tokens"):
        corpus.load(nothing)
    assert isinstance(nothing, HuggingFaceData)
    with pytest.raises(UserError, match="have no text in them"):
        next(Split(huggingface.load(nothing, "train"), Bytes()).documents(DataPosition(), seed=0, stream=1))
