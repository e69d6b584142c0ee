"""Small data sets of every kind, written by the tests: nothing is downloaded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from peer.config.data import AnyData, C4Data, HuggingFaceData, JsonlData, ParquetData, TextData, TokenizerConfig
from peer.config.schema import EvaluationConfig, RunConfig
from peer.data import corpus
from peer.data.batches import BatchStream
from peer.data.open import batches

LENGTH, BATCH = 16, 4
WORDS = ("peer", "swap", "round", "tensor", "average", "momentum", "weight", "loss", "step", "phase")
KINDS = ("jsonl", "jsonl.gz", "c4", "parquet", "parquet text", "disk", "builder", "streaming", "streaming ids")


def texts(count: int = 700, tag: str = "") -> list[str]:
    """Each begins with its number, so that it can be told from all others."""
    return [
        f"{tag}{index:05d} " + " ".join(WORDS[(index * 7 + k) % 10] for k in range(index % 13))
        for index in range(count)
    ]


def jsonl(path: Path, rows: Sequence[object]) -> Path:
    """One JSON value a line; strings become objects with a text."""
    lines = "".join(json.dumps({"text": row} if isinstance(row, str) else row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def padded(path: Path, rows: Sequence[str], *, width: int = 96, group: int = 32) -> Path:
    """As the NoLoCo authors have their set: every row as long as the longest, with a mask."""
    ids = [list(row.encode()) for row in rows]
    columns = {
        "input_ids": [it + [0] * (width - len(it)) for it in ids],
        "attention_mask": [[1] * len(it) + [0] * (width - len(it)) for it in ids],
    }
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def source(kind: str, folder: Path, rows: Sequence[str] | None = None, **more: object) -> AnyData:
    """A data set of ``rows`` in several files where the kind has files."""
    rows = texts() if rows is None else rows
    third = -(-len(rows) // 3)
    parts = [rows[start : start + third] for start in range(0, len(rows), third)]
    same = {"sequence_length": LENGTH, "shuffle": 10, **more}
    if kind in ("jsonl", "jsonl.gz"):
        for index, part in enumerate(parts):
            jsonl(folder / f"{index}.{kind}", part)
        return JsonlData(name="jsonl", train=(f"{folder}/*.{kind}",), **same)
    if kind == "c4":
        for index, part in enumerate(parts):
            jsonl(folder / f"c4-train.{index:05d}-of-00003.json.gz", [{"text": it, "url": "u"} for it in part])
        jsonl(folder / "c4-validation.00000-of-00001.json.gz", texts(50, "v"))
        return C4Data(name="c4", folder=folder, **same)
    if kind == "parquet":
        for index, part in enumerate(parts):
            padded(folder / f"{index}.parquet", part)
        return ParquetData(name="parquet", train=(f"{folder}/*.parquet",), **same)
    if kind == "parquet text":
        pq.write_table(pa.table({"body": list(rows)}), folder / "all.parquet", row_group_size=40)
        return ParquetData(name="parquet", train=(f"{folder}/*.parquet",), column="body", **same)
    return _hugging_face(kind, folder, rows, same)


def _hugging_face(kind: str, folder: Path, rows: Sequence[str], same: dict[str, object]) -> AnyData:
    import datasets

    if kind == "disk":
        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": list(rows)})}).save_to_disk(folder / "set")
        return HuggingFaceData(name="huggingface", path=str(folder / "set"), **same)
    (folder / "set").mkdir()
    if kind == "streaming ids":
        padded(folder / "set" / "train.parquet", rows)
        same |= {"column": "input_ids"}
    else:
        third = -(-len(rows) // 3)
        for index in range(3):
            jsonl(folder / "set" / f"train-{index:05d}-of-00003.jsonl", rows[index * third : (index + 1) * third])
    return HuggingFaceData(name="huggingface", path=str(folder / "set"), streaming=kind.startswith("streaming"), **same)


def text_with_a_set(folder: Path) -> dict[str, Any]:
    """Of ``run``: three texts to train on. One of them is a validation set too, and would be held out without it."""
    for letter in "ABC":
        (folder / letter).write_text(400 * letter)
    data = TextData(name="text", train=(f"{folder}/[ABC]",), sequence_length=LENGTH)
    letter = chr(corpus.load(data).validation[0])
    return {"data": data, "evaluation": EvaluationConfig(batches=2, sets={"more": (f"{folder}/{letter}",)})}


def stream(settings: AnyData, number: int = 0, *, batch_size: int = BATCH, seed: int = 0) -> BatchStream:
    """The training stream of a peer."""
    run = RunConfig(data=settings, batch_size=batch_size, seed=seed)
    return batches(run, corpus.load(settings).train, number)


def bpe(
    folder: Path, vocabulary: int = 300, *, name: str = "small", words: Sequence[str] | None = None, start: str = ""
) -> TokenizerConfig:
    """A real Hugging Face tokenizer, trained on ``words`` (:func:`texts`) and saved as one saves them. ``start``:
    what it puts before each text, as Llama 3's does.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>", *([start] if start else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts() if words is None else words, trainer)
    if start:
        special = [(start, fast.token_to_id(start))]
        fast.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=special)
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>").save_pretrained(folder)
    return TokenizerConfig(name=name, vocabulary=vocabulary, path=folder)
