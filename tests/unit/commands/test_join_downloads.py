"""What ``noloco-peer join`` says of downloads: with their size, and only of what is not here yet."""

from __future__ import annotations

import pytest

from peer.commands.join.words import downloads
from peer.config import load
from peer.hub import answers, size
from tests.unit.hub.server import Hub, Repository

CARD = b"""---
configs:
- config_name: small
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
---
"""
DATA = "run.data={name: huggingface, path: me/books, tokenizer: {name: me/words, vocabulary: 300}, streaming: %s}"


def said(hub: Hub, *settings: str) -> list[str]:
    books = {"README.md": CARD, "train.jsonl": bytes(3000), "test.jsonl": bytes(1000), "other.bin": bytes(10**6)}
    words = {"config.json": b"{}", "tokenizer.json": bytes(2_000_000), "vocab.json": bytes(998), "model.bin": bytes(99)}
    hub.repositories["me/books"] = Repository(private=True, files=books, commits=["first"])
    hub.repositories["me/words"] = Repository(private=True, files=words, commits=["first"])
    return list(downloads(load.load(None, settings, environment={})))


def test_the_sizes_are_those_of_the_files_that_are_read(hub: Hub) -> None:
    tokenizer = "download: the tokenizer me/words, 2.001 MB in 3 files"
    whole = "download: the data set me/books, as a whole before the first step, 4 kB in 2 files"
    assert said(hub, DATA % "false") == [tokenizer, whole]
    assert said(hub, DATA % "true") == [tokenizer, "download: the data set me/books, piece by piece, 3 kB in 1 file"]
    assert said(hub) == []  # bytes, and the Python standard library


def test_a_hub_that_is_silent_costs_its_deadline_and_the_sizes_are_unknown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(answers, "SILENCE", 0.3)
    hub.silent.set()
    assert [line.rpartition(", ")[2] for line in said(hub, DATA % "false")] == [size.UNKNOWN_SIZE] * 2
