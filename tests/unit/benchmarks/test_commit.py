"""The commit of kept figures: that of the tree, read without the index' lock."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commit


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with one committed file."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(commit, "ROOT", tmp_path)
    commit.commit.cache_clear()
    yield tmp_path
    commit.commit.cache_clear()


@pytest.mark.parametrize("changed", [False, True])
def test_a_change_of_a_tracked_file_is_said(tree: Path, changed: bool) -> None:
    (tree / "b").write_text("not tracked")
    (tree / "a").write_text("2" if changed else "1")
    assert commit.commit() == git(tree, "rev-parse", "HEAD")[:7] + "+" * changed


def test_the_index_is_left_as_it_was(tree: Path) -> None:
    """git would write it anew, as the file has another time; interrupted, it leaves a lock that stops all commits."""
    os.utime(tree / "a", (1e9, 1e9))
    before = (tree / ".git" / "index").read_bytes()
    assert not commit.commit().endswith("+")
    assert (tree / ".git" / "index").read_bytes() == before
    git(tree, "status")
    assert (tree / ".git" / "index").read_bytes() != before


def test_without_a_repository_it_is_unknown(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tree / "none"))
    assert commit.commit() == "unknown"
