"""No document that one peer validates on is trained on by another; no file that is validated on is trained on."""

from __future__ import annotations

import ast
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import peer
from peer.commands import tokenize
from peer.config.data import AnyData, C4Data, HuggingFaceData, ParquetData, TextData
from peer.data import corpus
from peer.data.sources.documents import Split
from peer.data.tokenizer import SEPARATOR, Tokens
from peer.errors import UserError
from tests.unit.data.harness import jsonl, padded, source, texts

ROWS = texts(2000)
ENDINGS = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet"}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def documents(tokens: Tokens) -> set[str]:
    pieces = np.split(tokens, np.where(tokens == SEPARATOR)[0] + 1)
    return {bytes(it[:-1].astype(np.uint8)).decode() for it in pieces if len(it)}


def sides(settings: AnyData) -> tuple[set[str], set[str]]:
    """The documents that are trained on, and those that are validated on."""
    found = corpus.load(settings)
    train = found.train
    trained = set().union(*map(documents, train.in_order())) if isinstance(train, Split) else documents(train)
    return trained, documents(found.validation)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet text", "disk", "builder", "streaming"])
def test_the_same_texts_are_held_out_whatever_format_and_files_they_are_in(kind: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    trained, held_out = sides(source("jsonl", tmp_path / "one", ROWS + ROWS[:700]))
    assert 10 <= len(held_out) <= 40 and not trained & held_out  # also what is there twice
    assert sides(source(kind, tmp_path / "other", ROWS)) == (trained, held_out)


def test_the_same_token_ids_are_held_out_padded_or_not_with_their_end_or_not(tmp_path: Path) -> None:
    for folder in ("one", "other", "own"):
        (tmp_path / folder).mkdir()
    trained, held_out = sides(source("parquet", tmp_path / "one", ROWS))
    assert held_out and not trained & held_out
    assert sides(source("streaming ids", tmp_path / "other", ROWS)) == (trained, held_out)
    jsonl(tmp_path / "own" / "rows.jsonl", ROWS)
    for folder in ("a", "b"):  # the names of the files contain those of the folders
        shutil.copytree(tmp_path / "own", tmp_path / folder)
        out = tmp_path / folder / "tokens"
        tokenize.run([f"{tmp_path / folder}/*"], out, "bytes", end=None, column="text", say=lambda line: None)
        data = ParquetData(name="parquet", train=(f"{out}/*.parquet",), sequence_length=16)
        assert sides(data) == (trained, held_out)


def test_the_same_texts_in_memory_are_held_out_whatever_their_files_are_called(tmp_path: Path) -> None:
    found = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        for index, text in enumerate(ROWS[:100]):
            (tmp_path / folder / f"{folder}{index}.txt").write_text(text)
        found.append(sides(TextData(name="text", train=(f"{tmp_path / folder}/*",), sequence_length=8)))
    assert found[0] == found[1] and found[0][1]


@pytest.mark.parametrize("kind", ["c4", "jsonl.gz", "parquet"])
def test_who_has_validation_files_does_not_train_on_what_others_hold_out(kind: str, tmp_path: Path) -> None:
    """It trained on all rows: by the first merge the others' models had seen their validation set."""
    data = source(kind, tmp_path, ROWS)
    if kind == "c4":
        assert isinstance(data, C4Data)
        shutil.copytree(tmp_path, tmp_path / "without", ignore=shutil.ignore_patterns("c4-validation*"))
        own, other = sides(data), sides(data.model_copy(update={"folder": tmp_path / "without"}))
    else:
        name = "held" if kind == "parquet" else "held.gz"
        validation = (jsonl if kind == "jsonl.gz" else padded)(tmp_path / name, texts(50, "v"))
        own, other = sides(data.model_copy(update={"validation": (str(validation),)})), sides(data)
    assert own[1] == set(texts(50, "v")) and other[1]
    assert own[0] == other[0] == set(ROWS) - other[1]


def test_of_so_few_texts_that_the_rule_holds_out_none_one_is_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer with other files may train on it. Of two files with one text, one was trained on and one validated on."""
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    data = TextData(name="text", train=(f"{tmp_path}/*.txt",), sequence_length=8)
    for index, text in enumerate(ROWS[20:25]):
        (tmp_path / f"{index}.txt").write_text(text)
    trained, (held_out,) = sides(data)
    assert trained == {*ROWS[20:25]} - {held_out} and len(trained) == 4
    assert caplog.text.count("of so few documents (5) one is held out that peers with other files may train on") == 1
    for index, text in enumerate(ROWS[20:25]):
        (tmp_path / f"{index} again.txt").write_text(text)
    assert sides(data) == (trained, {held_out})
    for path in tmp_path.iterdir():
        path.write_text(held_out)
    with pytest.raises(UserError, match=r"the train split has 0 tokens.*add text, name files to validate on"):
        corpus.load(data)


def test_of_many_texts_no_such_line_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    for index, text in enumerate(ROWS[:100]):
        (tmp_path / f"{index}.txt").write_text(text)
    assert sides(TextData(name="text", train=(f"{tmp_path}/*.txt",), sequence_length=8))[1]
    assert "so few documents" not in caplog.text


def write(kind: str, path: Path, rows: Sequence[str]) -> None:
    if kind == "text":
        path.write_text("\n".join(rows))
    elif kind == "jsonl":
        jsonl(path, rows)
    else:
        pq.write_table(pa.table({"text": rows}), path)


def of(kind: str, train: Sequence[str], validation: Sequence[str]) -> AnyData:
    from pydantic import TypeAdapter

    more = {"column": "text"} if kind == "parquet" else {}
    data = {"name": kind, "train": train, "validation": validation, "sequence_length": 8, **more}
    return TypeAdapter[AnyData](AnyData).validate_python(data)


def tokens(data: AnyData, sets: dict[str, tuple[str, ...]]) -> str:
    """What is trained on."""
    train = corpus.load(data, sets).train
    every = np.concatenate(list(train.in_order())) if isinstance(train, Split) else train
    return bytes(every[every < SEPARATOR].astype(np.uint8)).decode()


@pytest.mark.parametrize("kind", ENDINGS)
def test_what_is_validated_on_is_not_trained_on_and_each_file_is_read_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        write(kind, tmp_path / f"{name}.{ENDINGS[kind]}", [f"this is {name}"] * 2)
    (tmp_path / "link").symlink_to(tmp_path / f"a.{ENDINGS[kind]}")
    every, c, d = (f"{tmp_path}/{name}.{ENDINGS[kind]}" for name in "*cd")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    with caplog.at_level(logging.INFO, "noloco.data"):
        trained = tokens(of(kind, (every, "link", every), (f"./{Path(c).name}",)), {"more": (d,)})
    assert [trained.count(f"this is {name}") for name in "abcd"] == [2, 2, 0, 0]
    assert "2 of the 4 files to train on are left out" in caplog.text
    with pytest.raises(UserError, match=r"all files to train on are in run\.data\.validation or run\.evaluation"):
        tokens(of(kind, (c, d), (c,)), {"more": (d,)})


def test_files_of_c4_that_are_validated_on_are_not_trained_on(tmp_path: Path) -> None:
    source("c4", tmp_path, ROWS)
    held_out = next(tmp_path.glob("c4-train.00001*"))
    trained = tokens(C4Data(name="c4", folder=tmp_path, sequence_length=8), {"more": (str(held_out),)})
    third = -(-len(ROWS) // 3)
    assert [row[:5] in trained for row in (ROWS[0], ROWS[third], ROWS[-1])] == [True, False, True]


README = "---\nconfigs:\n- config_name: own\n  data_files: [{split: some, path: ['train-[[]a]*', train-b.*]}]\n---\n"


@pytest.mark.parametrize(
    "more", [{}, {"streaming": True}, {"split": "some[:100%]", "subset": "own"}], ids=["table", "streamed", "subset"]
)
def test_files_of_a_local_data_set_that_are_validated_on_are_not_trained_on(
    more: dict[str, object], tmp_path: Path
) -> None:
    """They were, of all sources by ``run.data.name: huggingface`` alone."""
    folder, names = tmp_path / "set", ("train-[a]", "train-b", "test")
    folder.mkdir()
    for name in names:
        jsonl(folder / f"{name}.jsonl", [f"this is {name} {index}" for index in range(400)])
    jsonl(tmp_path / "elsewhere.jsonl", ["this is another set"])
    if "subset" in more:
        (folder / "README.md").write_text(README)
    data = HuggingFaceData(name="huggingface", path=str(folder), sequence_length=8, **more)
    every, trained = (
        tokens(data, {"more": tuple(files)})
        for files in ([f"{tmp_path}/elsewhere.jsonl"], [f"{folder}/train-b.jsonl", f"{folder}/test.jsonl"])
    )
    counts = [every.count(f"this is {name}") for name in names]
    assert min(counts[:2]) > 380 and not counts[2]
    assert [trained.count(f"this is {name}") for name in names] == [counts[0], 0, 0]
    with pytest.raises(UserError, match=r"all files to train on are in run\.data\.validation or run\.evaluation"):
        tokens(data, {"more": (f"{folder}/*.jsonl",)})


def test_no_part_of_the_program_forgets_the_sets() -> None:
    """Three commands did: they trained or validated on other texts than the peers of the run."""
    calls = [
        ast.unparse(node)
        for path in Path(peer.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "corpus.load"
    ]
    assert set(calls) == {"corpus.load(run.data, run.evaluation.sets, needed)"}


def test_rows_of_which_none_is_held_out_are_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the validation split has 0 tokens.*name files to validate on"):
        corpus.load(source("jsonl", tmp_path, ROWS[:3]))
