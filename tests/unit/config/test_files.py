"""A file is replaced as a whole, and who may not read it never can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from peer.config.files import replacing


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_new_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("old")
    with replacing(path) as new:
        new.write_text("new")
        assert path.read_text() == "old" and new.parent == path.parent
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.touch()
    assert rights(path) == rights(plain)


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
def test_after_an_error_all_is_as_before(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "some.json"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as new:
        new.write_text("ha")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_first_error_is_the_one_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "no folder" / "file"):
        pytest.fail("there is nothing to write to")
    with pytest.raises(KeyError), replacing(tmp_path / "file") as new:
        new.unlink()
        raise KeyError


def test_others_can_never_read_a_key_although_a_kill_has_left_a_file_that_they_can(tmp_path: Path) -> None:
    path = tmp_path / "some.key"
    with replacing(path) as left:
        pass
    path.rename(left)  # as a process of the same id left it
    left.chmod(0o666)
    reader = os.open(left, os.O_RDONLY)
    with replacing(path, 0o600) as new:
        assert new == left and rights(new) == 0o600
        new.write_text("secret")
        assert os.read(reader, 10) == b""
    os.close(reader)
    assert rights(path) == 0o600


def test_a_new_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut left a key of no bytes, with which no start succeeded."""
    done: list[str] = []
    rename = Path.replace

    def fsync(descriptor: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def replace(old: Path, new: Path) -> Path:
        done.append("rename")
        return rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    with replacing(tmp_path / "some.key") as new:
        new.write_text("secret")
    assert done == [str(new), "rename", str(tmp_path)]
