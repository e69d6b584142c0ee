"""The size of a download is said before it: of what is not here yet, and that it is unknown when it is."""

from __future__ import annotations

import pytest
from huggingface_hub import constants, snapshot_download

from peer.hub import answers, size
from peer.hub.size import data_size, download_size, in_words
from tests.unit.hub.server import Hub, Repository

WANTED = ("config.json", "model*.safetensors")
FILES = {
    "config.json": b"{}",
    "model-1.safetensors": bytes(1_500_000),
    "model-2.safetensors": bytes(500_000),
    "pytorch_model.bin": bytes(9_000_000),
}


def test_the_wanted_files_count_until_they_are_here(hub: Hub) -> None:
    hub.repositories["me/model"] = Repository(private=True, files=dict(FILES), commits=["first"])
    assert download_size("me/model", None, WANTED) == "2 MB in 3 files"
    snapshot_download("me/model", allow_patterns=["config.json", "model-1.safetensors"])
    assert download_size("me/model", None, WANTED) == "500 kB in 1 file"
    snapshot_download("me/model", allow_patterns=list(WANTED))
    assert download_size("me/model", None, WANTED) == ""


def test_a_size_that_the_hub_does_not_tell_is_unknown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["me/model"] = Repository(private=True, files={"other.bin": b""})
    assert download_size("me/model", None, WANTED) == size.UNKNOWN_SIZE
    monkeypatch.setattr(size, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(answers, "SILENCE", 0.3)
    hub.silent.set()
    assert download_size("me/model", None, WANTED) == size.UNKNOWN_SIZE


CARD = b"""---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/train.jsonl}
  - {split: test, path: [small/test.jsonl, small/more.jsonl]}
- {config_name: large, default: true, data_files: "large/*"}
- {config_name: odd, data_dir: odd}
---
"""
BOOKS = {
    "README.md": CARD,
    "small/train.jsonl": bytes(3000),
    "small/test.jsonl": bytes(700),
    "small/more.jsonl": bytes(300),
    "large/a.jsonl": bytes(5_000_000),
    "large/b.jsonl": bytes(1_000_000),
    "odd/c.jsonl": bytes(9),
}


@pytest.mark.parametrize(
    ("subset", "splits", "words"),
    [
        ("small", (), "4 kB in 3 files"),
        ("small", ("train", None), "3 kB in 1 file"),
        ("large", (), "6 MB in 2 files"),
        ("large", ("train",), "6 MB in 2 files"),  # the card does not say which are of the split
        (None, (), "6 MB in 2 files"),
        ("odd", (), size.UNKNOWN_SIZE),
        ("none", (), size.UNKNOWN_SIZE),
    ],
)
def test_a_data_set_is_as_large_as_the_files_that_its_card_lists(
    subset: str | None, splits: tuple[str | None, ...], words: str, hub: Hub
) -> None:
    hub.repositories["me/books"] = Repository(private=True, files=dict(BOOKS), commits=["first"])
    assert data_size("me/books", subset, splits) == words


def test_the_files_of_a_data_set_count_until_they_are_here(hub: Hub) -> None:
    hub.repositories["me/books"] = Repository(private=True, files=dict(BOOKS), commits=["first"])
    snapshot_download("me/books", repo_type="dataset", allow_patterns=["small/test.jsonl", "large/*"])
    assert data_size("me/books", "small", ()) == "3.3 kB in 2 files"
    assert data_size("me/books", None, ()) == ""


@pytest.mark.parametrize(
    "card",
    [
        b"# no card",
        b"---\nconfigs: 5\n---\n",
        b"---\nconfigs: [5]\n---\n",
        b"---\nconfigs: [{data_files: [5]}]\n---\n",
        b"---\nconfigs: [{config_name: a, data_files: [{path: 5, split: train}]}]\n---\n",
        b"---\nconfigs: [{config_name: [a], data_files: [{path: a}]}]\n---\n",
    ],
)
def test_a_card_of_another_form_tells_no_size(card: bytes, hub: Hub) -> None:
    hub.repositories["me/books"] = Repository(private=True, files={**BOOKS, "README.md": card}, commits=["first"])
    assert data_size("me/books", None, ()) == size.UNKNOWN_SIZE
    assert data_size("me/books", "a", ("train",)) == size.UNKNOWN_SIZE


@pytest.mark.parametrize("name", ["me/none", "no name!"])
def test_the_download_itself_says_why_there_is_none(hub: Hub, name: str) -> None:
    assert download_size(name, None, WANTED) == ""


def test_without_a_network_nothing_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download_size("me/model", None, WANTED) == ""


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], size.UNKNOWN_SIZE),
        ([None], size.UNKNOWN_SIZE),
        ([999], "999 bytes in 1 file"),
        ([16_060_522_496, 1_000], "16.06 GB in 2 files"),
        ([5_000, None, None], f"5 kB in 1 file, and 2 {size.UNKNOWN_SIZE}"),
    ],
)
def test_in_words(sizes: list[int | None], words: str) -> None:
    assert in_words(sizes) == words
