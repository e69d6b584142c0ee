"""``noloco-peer tokenize``: what it writes is what the training reads; a file is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from peer.commands import tokenize
from peer.commands.cli import main
from peer.config.data import JsonlData, ParquetData, TokenizerConfig
from peer.data import corpus
from peer.data.sources import opening
from peer.data.sources.documents import Split
from peer.data.tokenizer import Tokens, load
from peer.errors import UserError
from tests.unit.data.harness import bpe, jsonl, texts


def run(patterns: list[str], out: Path, tokenizer: str = "bytes", **more: str) -> list[str]:
    said: list[str] = []
    tokenize.run(patterns, out, tokenizer, end=more.get("end"), column=more.get("column", "text"), say=said.append)
    return said


def documents(out: Path, tokenizer: TokenizerConfig) -> list[str]:
    from transformers import AutoTokenizer

    whole = split(ParquetData(name="parquet", train=(f"{out}/*.parquet",), tokenizer=tokenizer))
    fast = AutoTokenizer.from_pretrained(tokenizer.path)
    return [fast.decode(ids[:-1].tolist()) for ids in whole.in_order()]


def split(data: ParquetData) -> Split:
    """All rows: of so few the held-out ones may be none."""
    return replace(opening.splits(data, load(data.tokenizer))[0], held_out=None)


def test_what_is_written_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bpe(tmp_path / "small")
    jsonl(tmp_path / "b.jsonl.gz", texts(400, "b"))
    jsonl(tmp_path / "a.jsonl", texts(300, "a"))
    monkeypatch.setattr(tokenize, "ROW_GROUP", 1000)
    said = run([f"{tmp_path}/*.jsonl*"], tmp_path / "out", str(tmp_path / "small"))
    assert sorted(documents(tmp_path / "out", own)) == sorted(texts(300, "a") + texts(400, "b"))
    assert f'tokenizer: {{name: small, vocabulary: 300, path: "{tmp_path / "small"}"}}' in said[-1]
    for file in (tmp_path / "out").glob("*"):
        it = pq.ParquetFile(file)
        assert it.num_row_groups > 2 and it.metadata.row_group(0).column(0).compression == "ZSTD"
        rows = it.read().to_pylist()
        assert all(len(row["input_ids"]) == len(row["attention_mask"]) for row in rows)


def test_text_files_become_documents(tmp_path: Path) -> None:
    whole = "".join(f"{line}\n" for line in texts(6000))
    (tmp_path / "a.txt").write_text(whole)
    run([f"{tmp_path}/a.txt"], tmp_path / "out")
    rows = pq.read_table(tmp_path / "out").column("input_ids").to_pylist()
    assert len(rows) > 2
    assert bytes(token for row in rows for token in row if token < 256).decode() == whole


def test_a_name_that_is_no_utf_8_is_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As archives of older systems have them: it was a traceback, here and where such a file was trained on."""
    for kind in (b"txt", b"jsonl"):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9." + kind))
        jsonl(path, texts(20))
        with pytest.raises(SystemExit) as ended:
            main(["tokenize", str(path), str(tmp_path / "out")])
        assert ended.value.code == 0 and f"caf\\udce9.{kind.decode()}: " in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("caf[?]-*.parquet"))) == 2
    opened, _ = opening.splits(JsonlData(name="jsonl", train=(str(path),)), load(TokenizerConfig()))
    assert len(opened.fingerprint) == 8


def test_a_second_call_goes_on_where_the_first_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        jsonl(tmp_path / f"{name}.jsonl", texts(100, name))
    broken = tmp_path / "b.jsonl"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-30] + b"{broken\n")
    with pytest.raises(UserError, match=r"b\.jsonl row 100: is not JSON"):
        run([f"{tmp_path}/*.jsonl"], tmp_path / "out")
    assert [path.name[0] for path in (tmp_path / "out").iterdir()] == ["a"]
    broken.write_bytes(whole)
    said = run([f"{tmp_path}/*.jsonl"], tmp_path / "out")
    assert ["is there already" in line for line in said] == [True, False, False, False]
    jsonl(tmp_path / "a.jsonl", texts(101, "a"))
    assert "is there already" not in run([f"{tmp_path}/*.jsonl"], tmp_path / "out")[0]


def test_two_calls_at_once_leave_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wrote into one temporary file: it was corrupt, and later calls took it for complete."""
    jsonl(tmp_path / "a.jsonl", texts(300))
    out, groups = tmp_path / "out", tokenize._groups
    names: list[set[str]] = []

    def second_beside_the_first(split: Split) -> Iterator[list[Tokens]]:
        monkeypatch.setattr(tokenize, "_groups", groups)
        for index, group in enumerate(groups(split)):
            yield group
            if not index:
                names.append({path.name for path in out.iterdir()})
                run([f"{tmp_path}/a.jsonl"], out)

    monkeypatch.setattr(tokenize, "ROW_GROUP", 1000)
    monkeypatch.setattr(tokenize, "_groups", second_beside_the_first)
    run([f"{tmp_path}/a.jsonl"], out)
    assert [path.suffix for path in out.iterdir()] == [".parquet"]
    rows = pq.read_table(out).column("input_ids").to_pylist()
    assert [bytes(row[:-1]).decode() for row in rows] == texts(300)
    assert str(os.getpid()) in names[0].pop()  # of this process alone


def test_what_else_the_folder_has_is_a_line(tmp_path: Path) -> None:
    """Machines that mounted the sources elsewhere wrote each document twice, and the run trained on both."""
    out = tmp_path / "out"
    for mount in ("here", "there"):
        (tmp_path / mount).mkdir()
        for name in ("a.jsonl", "b.jsonl.gz"):
            jsonl(tmp_path / mount / name, texts(10))
    jsonl(tmp_path / "0.jsonl", texts(10))
    run([f"{tmp_path}/0.jsonl"], out)
    pq.write_table(pa.table({"input_ids": [[1]]}), out / "c.parquet")  # of another origin
    (out / "d.parquet").write_text("no Parquet")
    assert "also has" not in "".join(run([f"{tmp_path}/0.jsonl"], out))
    for source, other in (
        ("here/a.jsonl", "0.jsonl, which"),
        ("there/a.jsonl", "here/a.jsonl and 1 more, which"),  # the one that may be the same
        ("there/b.jsonl.gz", "0.jsonl and 2 more, which"),
    ):
        *_, line, _ = run([f"{tmp_path}/{source}"], out)
        assert f"{out} also has " in line and f" made of {tmp_path}/{other}" in line
        assert f"{out}/*.parquet trains on both" in line
    assert len(run([f"{tmp_path}/*.jsonl", f"{tmp_path}/*/*.jsonl*"], out)) == 6  # five files, and how to train on them


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "a.jsonl", texts(10))
    endings: list[list[str]] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: endings.append([path.suffix for path in (tmp_path / "out").iterdir()])
    )
    run([f"{tmp_path}/a.jsonl"], tmp_path / "out")
    assert endings == [[".tmp"]]


def test_the_wrong_tokenizer_for_such_a_file_is_a_line(tmp_path: Path) -> None:
    own = bpe(tmp_path / "small")
    jsonl(tmp_path / "a.jsonl", texts())
    run([f"{tmp_path}/a.jsonl"], tmp_path / "out", str(tmp_path / "small"))
    data = ParquetData(name="parquet", train=(f"{tmp_path}/out/*.parquet",), sequence_length=16)
    with pytest.raises(UserError, match=r"was made with the tokenizer small, run\.data\.tokenizer\.name is bytes"):
        corpus.load(data)
    assert corpus.load(data.model_copy(update={"tokenizer": own}))
    other = bpe(tmp_path / "other", words=[text.upper() for text in texts()])  # of the same name and size
    with pytest.raises(UserError, match="was made with another tokenizer called small; tokenize again"):
        corpus.load(data.model_copy(update={"tokenizer": other}))


def test_another_end_makes_the_files_again_and_is_in_the_line_to_train_with(tmp_path: Path) -> None:
    bpe(tmp_path / "small")
    jsonl(tmp_path / "a.jsonl", texts(100))
    plain, out = run([f"{tmp_path}/a.jsonl"], tmp_path / "out", str(tmp_path / "small")), tmp_path / "out"
    said = run([f"{tmp_path}/a.jsonl"], out, str(tmp_path / "small"), end="a")
    assert "end:" not in plain[-1] and "is there already" not in said[0]
    settings = yaml.safe_load("{" + said[-1].partition("run.data: {")[2])
    assert settings["tokenizer"]["end"] == "a"
    whole = split(ParquetData(**settings))
    first = next(iter(whole.in_order()))
    assert first[-1] == whole.tokenizer.end != first[-2]  # once


def test_another_end_than_the_run_has_is_a_line(tmp_path: Path) -> None:
    """Each document ended twice: with both."""
    own = bpe(tmp_path / "small")
    jsonl(tmp_path / "a.jsonl", texts())
    run([f"{tmp_path}/a.jsonl"], tmp_path / "out", str(tmp_path / "small"), end="a")
    data = ParquetData(name="parquet", train=(f"{tmp_path}/out/*.parquet",), sequence_length=16, tokenizer=own)
    with pytest.raises(UserError, match=r"end with 'a' and those of the run with '<\|end\|>'; set run\.data\.token"):
        corpus.load(data)
    assert corpus.load(data.model_copy(update={"tokenizer": own.model_copy(update={"end": "a"})}))


def test_files_begin_as_their_tokenizer_begins_a_text_and_another_start_is_a_line(tmp_path: Path) -> None:
    """Files that say no start, as of an earlier version, get the run's."""
    own = bpe(tmp_path / "small", start="<|begin|>")
    shutil.copytree(tmp_path / "small", tmp_path / "other")
    same_tokens = json.loads((tmp_path / "other" / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(same_tokens))
    jsonl(tmp_path / "a.jsonl", texts())
    out = tmp_path / "out"
    run([f"{tmp_path}/a.jsonl"], out, str(tmp_path / "small"))
    data = ParquetData(name="parquet", train=(f"{out}/*.parquet",), sequence_length=16, tokenizer=own)
    tokenizer, (path,) = load(own), out.iterdir()
    whole = [it.tolist() for it in split(data).in_order()]
    assert all(it[0] == tokenizer.start[0] != it[1] and it[-1] == tokenizer.end for it in whole)
    table = pq.read_table(path)
    assert table["input_ids"].to_pylist() == whole
    without = data.model_copy(update={"tokenizer": own.model_copy(update={"path": tmp_path / "other"})})
    with pytest.raises(UserError, match=r"start with '<\|begin\|>' and those of the run with ''; set run\.data"):
        corpus.load(without)

    said = json.loads(table.schema.metadata[b"noloco.source"])
    assert said.pop("start") == list(tokenizer.start)
    earlier = table.set_column(0, "input_ids", pa.array([it[1:] for it in whole])).drop_columns("attention_mask")
    earlier = earlier.replace_schema_metadata({**table.schema.metadata, b"noloco.source": json.dumps(said)})
    pq.write_table(earlier, path)
    assert [it.tolist() for it in split(data).in_order()] == whole


@pytest.mark.parametrize("metadata", [{}, {"noloco.source": "{"}, {"noloco.source": "[]"}, {"noloco.source": "{}"}])
def test_a_file_need_not_say_its_end(metadata: dict[str, str], tmp_path: Path) -> None:
    table = pa.table({"input_ids": [list(row.encode()) for row in texts()]})
    metadata = {"noloco.tokenizer": "bytes", **metadata}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    assert corpus.load(ParquetData(name="parquet", train=(f"{tmp_path}/a.parquet",), sequence_length=16))


@pytest.mark.parametrize("change", ["tokenizer", "source"])
def test_another_tokenizer_or_text_of_the_same_size_makes_the_files_again(change: str, tmp_path: Path) -> None:
    bpe(tmp_path / "small")
    jsonl(tmp_path / "a.jsonl", texts(100))
    run([f"{tmp_path}/a.jsonl"], tmp_path / "out", str(tmp_path / "small"))
    upper = [text.upper() for text in texts(100)]
    if change == "source":
        jsonl(tmp_path / "a.jsonl", upper)
    own = bpe(tmp_path / "small", words=upper if change == "tokenizer" else None)
    said = run([f"{tmp_path}/a.jsonl"], tmp_path / "out", str(tmp_path / "small"))
    assert "is there already" not in said[0]
    assert documents(tmp_path / "out", own) == (upper if change == "source" else texts(100))
    assert "is there already" in run([f"{tmp_path}/a.jsonl"], tmp_path / "out", str(tmp_path / "small"))[0]


def test_of_parquet_the_named_column_is_tokenised(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[7, 8]] * 50, "text": texts(50)}), tmp_path / "a.parquet")
    run([f"{tmp_path}/a.parquet"], tmp_path / "out")
    rows = pq.read_table(tmp_path / "out").column("input_ids").to_pylist()
    assert [bytes(row[:-1]).decode() for row in rows] == texts(50)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere*.jsonl", "OUT"], "SOURCE: no file matches"),
        (["a.jsonl", "a.jsonl"], "OUT: cannot make the folder"),
        (["a.jsonl", "OUT", "--column", "body"], "row 1: has no 'body'"),
        (["empty.txt", "OUT"], "is empty"),
        (["a.jsonl", "OUT", "--tokenizer", "~nobody-here/t"], "cannot load ~nobody-here/t"),
        (
            ["a.jsonl", "OUT", "--tokenizer", "./bytes"],
            "/bytes names the tokenizer, which cannot be 'bytes'",
        ),
        (["a.jsonl", "OUT", "--tokenizer", "bytes/tokenizer.json"], "the folder of "),
        (["a.jsonl", "OUT", "--end", "x"], "--end: the tokenizer bytes has an end of its own"),
    ],
)
def test_a_mistake_is_a_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("peer.logs.setup", lambda *where: None)  # it would keep the captured stderr
    jsonl(tmp_path / "a.jsonl", texts(10))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "tokenizer.json").touch()
    with pytest.raises(SystemExit) as caught:
        main(["tokenize", *arguments])
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and says in said[0]
