"""A checkpoint is saved by a process that is killed before each of its calls to the file system in turn."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peer.training.checkpoint import LATEST, Checkpoints
from tests.saved import save_checkpoint

CALLS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "os.listdir",
    "os.open",
    "shutil.rmtree",
)
MOST = 500


def save(folder: Path, step: int, value: float) -> None:
    tensors = {"model": {"w": torch.full((1000,), value)}, "outer": {"phi": torch.full((1000,), value)}}
    assert save_checkpoint(Checkpoints(folder, keep=2), step, {"value": value}, tensors.items())


def killed_before_call(number: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child that gets SIGKILL before its ``number``-th call; ``False`` when it ended before that."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal calls
            if event not in CALLS:
                return
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

        original = os.fsync

        def fsync(descriptor: int) -> None:
            count("open", ())
            original(descriptor)

        os.fsync = fsync
        sys.addaudithook(count)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [10, 20, 30])
def test_whenever_the_kill_comes_a_whole_checkpoint_is_there(tmp_path: Path, step: int) -> None:
    """Steps 10 and 20 are there; 20 may be saved again (as when leaving right behind a boundary), 30 pushes 10 out."""
    template = tmp_path / "template"
    save(template, 10, 1.0)
    save(template, 20, 2.0)
    for number in range(1, MOST):
        folder = tmp_path / str(number)
        shutil.copytree(template, folder)
        killed = killed_before_call(number, lambda folder=folder: save(folder, step, 3.0))  # type: ignore[misc]
        left = sorted(path.name for path in folder.iterdir())
        saved = Checkpoints(folder, keep=2).newest()  # as an export reads, beside a peer that may be in mid-save
        assert sorted(path.name for path in folder.iterdir()) == left, number
        assert saved is not None
        assert saved.state["value"] in (2.0, 3.0), number
        assert bool((saved.tensors["model"]["w"] == saved.state["value"]).all())
        Checkpoints(folder, keep=2).require_space(0)  # the peer begins again
        assert (folder / (folder / LATEST).read_text().strip()).is_dir(), number
        save(folder, 40, 4.0)  # and the next one tidies up
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], number
        shutil.rmtree(folder)
        if not killed:
            assert number > 20
            return
    raise AssertionError("it never came to an end")
