"""A folder has one peer, whatever happens to the processes. The plain cases are in test_run_folder.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peer.errors import DISK_FULL, RunError, UserError
from peer.training.run_folder import claim

CLAIM = (
    "import sys; from pathlib import Path; from peer.training.run_folder import claim; "
    "folder = claim(Path(sys.argv[1]), {name!r}); "
)


def process(tmp_path: Path, name: str | None, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM.format(name=name) + then, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_peers_that_start_at_the_same_moment_get_different_folders(tmp_path: Path) -> None:
    children = [process(tmp_path, None, "print(folder.name, flush=True); input()") for _ in range(5)]
    names = [said(child) for child in children]
    for child in children:
        child.communicate("\n", timeout=10)
    assert len(set(names)) == 5
    assert all((tmp_path / name).is_dir() for name in names)
    assert claim(tmp_path, None).name == min(names)  # all have ended: the first one again


def test_the_gap_of_a_peer_that_left_is_filled_first(tmp_path: Path) -> None:
    folders = [claim(tmp_path, None) for _ in range(3)]
    folders[1].release()
    assert claim(tmp_path, None).name == folders[1].name
    assert [folder.name.rpartition("-")[2] for folder in folders] == ["1", "2", "3"]


def test_a_refused_name_is_told_with_its_folder_and_its_peer_goes_on(tmp_path: Path) -> None:
    first = claim(tmp_path, "x")
    for _ in range(2):  # a refusal must not take the lock away
        with pytest.raises(UserError, match="used by a running peer") as caught:
            claim(tmp_path, "x")
    assert str(tmp_path / "x") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    first.release()
    assert claim(tmp_path, "x").path == tmp_path / "x"


def test_a_killed_peer_leaves_its_place_even_if_its_daemon_lives_on(tmp_path: Path) -> None:
    then = (
        "import subprocess; daemon = subprocess.Popen(['sleep', '60'], close_fds=False, stdout=subprocess.DEVNULL); "
        "print(daemon.pid, flush=True); input()"
    )
    holder = process(tmp_path, "x", then)
    daemon = int(said(holder))
    try:
        with pytest.raises(UserError, match="used by a running peer"):
            claim(tmp_path, "x")
        holder.kill()
        holder.communicate(timeout=10)
        os.kill(daemon, 0)  # it lives
        assert claim(tmp_path, "x").name == "x"
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_released_folder_is_free_although_a_forked_process_has_a_copy_of_its_lock(tmp_path: Path) -> None:
    """A worker of a data loader: the next start with the same name was refused, or took another folder."""
    folder = claim(tmp_path, "x")
    copy = os.dup(folder._lock)
    try:
        folder.release()
        assert claim(tmp_path, "x").name == "x"
    finally:
        os.close(copy)


def test_a_forked_process_does_not_release_the_folder_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = claim(tmp_path, "x")
    copy = os.dup(folder._lock)  # the parent's
    try:
        with monkeypatch.context() as child:
            child.setattr("os.getpid", lambda: -1)
            folder.release()
        with pytest.raises(UserError, match="used by a running peer"):
            claim(tmp_path, "x")
    finally:
        os.close(copy)


def test_a_run_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir: cannot write to") as caught:
        claim(tmp_path / "file", None)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("number", DISK_FULL)
def test_a_folder_on_a_full_disk_is_tried_again(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under systemd exit code 2 is the end of a peer."""

    def full(*_: object, **__: object) -> None:
        raise OSError(number, "broken")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(RunError, match=r"run\.dir: cannot write to .*/x: broken; free some space$"):
        claim(tmp_path, "x")


def test_the_machines_name_makes_a_name_that_the_swarm_takes(tmp_path: Path) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", claim(tmp_path / "new" / "deep", None).name)
