"""What is saved comes back whole, or the one before does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import RunError, UserError
from peer.training.checkpoint import Checkpoints
from tests.saved import save_checkpoint

TENSORS = {"model": {"w": torch.arange(5.0)}, "outer": {"phi": torch.ones(3), "count": torch.tensor(7)}}


def saved(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        assert save_checkpoint(checkpoints, step, {"config": "c", "words": [step]}, TENSORS.items())
    return checkpoints


def test_everything_comes_back(tmp_path: Path) -> None:
    newest = saved(tmp_path, 10).newest()
    assert newest is not None
    assert newest.state["words"] == [10]
    for part, content in TENSORS.items():
        for name, value in content.items():
            assert torch.equal(newest.tensors[part][name], value)


def test_the_newest_are_kept_and_pointed_at(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3, 10, keep=2)
    assert [path.name for path in checkpoints.all()] == ["step_00000003", "step_00000010"]
    assert (tmp_path / "latest").read_text().strip() == "step_00000010"
    assert list(tmp_path.glob(".tmp-*")) == []


def test_a_file_system_that_cannot_sync_folders_has_checkpoints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of networks and of FUSE; nothing was ever saved there."""
    sync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    newest = saved(tmp_path, 1, 2).newest()
    assert newest is not None and newest.state["words"] == [2]


@pytest.mark.parametrize("name", ["model.safetensors", "outer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_one_is_skipped_for_the_one_before(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    path = tmp_path / "step_00000002" / name
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(b"\xff" + data[1:] if name == "state.json" else data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.state["step"] == 1


def test_a_save_that_was_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    half = tmp_path / ".tmp-step_00000002"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert checkpoints.newest() is not None
    assert save_checkpoint(checkpoints, 2, {}, TENSORS.items())
    assert checkpoints.newest().state["step"] == 2  # type: ignore[union-attr]


def test_a_reader_beside_the_peer_finds_one_that_is_being_replaced_and_moves_nothing(tmp_path: Path) -> None:
    """It moved it back: the peer's save of the same step failed, and on a read-only disk the reader did."""
    checkpoints = saved(tmp_path, 1, 2)
    written = checkpoints.write(2, {"words": "new"}, TENSORS.items())
    rename, between = Path.rename, []

    def and_read(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        between.append(Checkpoints(tmp_path, keep=1).newest())
        return moved

    with patch.object(Path, "rename", and_read):
        assert checkpoints.publish(written)
    assert [it.state["words"] for it in between if it] == [[2], "new", "new"]
    assert checkpoints.newest().state["words"] == "new"  # type: ignore[union-attr]
    assert [path.name for path in checkpoints.all()] == ["step_00000001", "step_00000002"]


def test_what_a_kill_left_half_written_does_not_fill_the_disk(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_00000517").mkdir()  # by SIGKILL in mid-save; the resumed run saves at other steps
    saved(tmp_path, 500, 600, 700)
    assert list(tmp_path.glob(".tmp-*")) == []


def test_a_checkpoint_that_is_being_written_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room is there again after it: the alert of a full disk fired in saves of more than a minute."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    checkpoints = saved(tmp_path, 1)
    assert checkpoints.free_bytes() == 1000
    half = tmp_path / ".tmp-step_00000002"
    half.mkdir()
    (half / "model.safetensors").write_bytes(bytes(400))
    assert checkpoints.free_bytes() == 1400


@settings(max_examples=60)
@given(st.sampled_from(["model.safetensors", "outer.safetensors", "state.json"]), st.floats(0, 1), st.integers(0, 7))
def test_no_flipped_bit_gets_into_a_run(name: str, place: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = saved(Path(folder), 1, 222)
        good = checkpoints.newest()
        path = Path(folder) / "step_00000222" / name
        data = bytearray(path.read_bytes())
        data[round(place * (len(data) - 1))] ^= 1 << bit
        path.write_bytes(data)
        newest = checkpoints.newest()
        assert newest is not None and good is not None
        assert newest.state["step"] == 1 or newest.state == good.state


@pytest.mark.parametrize("content", ["[]", "null", "3", '{"digests": null}', '{"digests": {}}'])
def test_a_state_that_is_not_a_state_is_skipped_too(tmp_path: Path, content: str) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    (tmp_path / "step_00000002" / "state.json").write_text(content)
    newest = checkpoints.newest(lambda state: "" if state["config"] == "c" else "of another run")
    assert newest is not None
    assert newest.state["step"] == 1


def test_who_goes_on_from_a_step_before_keeps_the_new_ones(tmp_path: Path) -> None:
    """It has taken the weights of others, who were less far: what it had given up is not resumed, and goes first."""
    saved(tmp_path, 40, 50, keep=2)
    for step, left in ((20, [50, 20]), (30, [20, 30]), (60, [30, 60])):
        checkpoints = saved(tmp_path, step, keep=2)
        assert [int(path.name.removeprefix("step_")) for path in checkpoints.all()] == left
        newest = checkpoints.newest()
        assert newest is not None and newest.state["step"] == step


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    assert len(saved(tmp_path, 4, 4).all()) == 1


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", 2).newest() is None


def test_one_of_another_run_is_refused_and_not_skipped(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another run"):
        saved(tmp_path, 1, 2).newest(lambda state: "of another run")


def test_too_small_a_disk_is_said_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no space for checkpoints") as caught:
        Checkpoints(tmp_path, keep=10**9).require_space(10**9)
    assert "\n" not in str(caught.value)
    Checkpoints(tmp_path, keep=1).require_space(1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write checkpoints"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1).require_space(1)


@pytest.mark.parametrize(("number", "kind"), [("ENOSPC", RunError), ("EDQUOT", RunError), ("EACCES", UserError)])
def test_a_full_disk_is_tried_again_and_a_wrong_folder_is_not(
    number: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of the service on a full disk ended the peer for good."""

    def broken(*_: object, **__: object) -> None:
        raise OSError(getattr(errno, number), "broken")

    monkeypatch.setattr(Path, "mkdir", broken)
    with pytest.raises(kind, match="cannot write checkpoints: broken"):
        Checkpoints(tmp_path / "new", keep=1).require_space(1)


def test_a_peer_whose_own_checkpoints_fill_the_disk_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1, 2, keep=2)
    each = sum(path.stat().st_size for path in checkpoints.path(2).iterdir())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=each))
    checkpoints.require_space(each)
    checkpoints.path(1).rename(tmp_path / ".tmp-step_00000001")  # half of a save that was killed
    checkpoints.require_space(each)
    shutil.rmtree(tmp_path / ".tmp-step_00000001")
    with pytest.raises(RunError, match="free or in old checkpoints"):  # a service tries again
        checkpoints.require_space(each)


def test_what_is_beside_the_checkpoints_needs_space_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=250))
    Checkpoints(tmp_path, keep=1).require_space(100, 50)
    with pytest.raises(RunError, match="no space for checkpoints"):
        Checkpoints(tmp_path, keep=1).require_space(100, 51)


def test_more_old_checkpoints_than_are_kept_are_no_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed after a save, so the save itself would fail."""
    saved(tmp_path, 1, 2, 3, keep=3)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(RunError, match="no space for checkpoints"):
        checkpoints.require_space(sum(path.stat().st_size for path in checkpoints.path(3).iterdir()))


def test_the_files_are_what_the_readme_promises(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    folder = tmp_path / "step_00000007"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "outer.safetensors", "state.json"}
    assert json.loads((folder / "state.json").read_text())["state"]["step"] == 7


def test_a_full_disk_is_survived_and_said(tmp_path: Path) -> None:
    program = f"""
import logging, resource, signal, sys, torch
from pathlib import Path
from peer.training.checkpoint import Checkpoints
logging.basicConfig(stream=sys.stdout)
checkpoints = Checkpoints(Path({str(tmp_path)!r}), 2)
assert checkpoints.publish(checkpoints.write(1, {{}}, {{"model": {{"w": torch.ones(10)}}}}.items()))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
print("saved", checkpoints.publish(checkpoints.write(2, {{}}, {{"model": {{"w": torch.ones(10**6)}}}}.items())))
print("newest", checkpoints.newest().state["step"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved False" in done.stdout and "newest 1" in done.stdout
    assert "checkpoint of step 2 not saved" in done.stdout
    assert list(tmp_path.glob(".tmp-*")) == []
