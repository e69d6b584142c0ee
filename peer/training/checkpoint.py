"""Checkpoints: safetensors for tensors, JSON for the rest; no pickle.

    checkpoints/step_00000500/{model,untrained,optimizer,outer}.safetensors, state.json
    checkpoints/latest        the name of the newest checkpoint

A checkpoint is written to a temporary folder, synced to disk and renamed, so a folder with a final name is complete.
``state.json`` holds a digest of each file and of itself. A damaged checkpoint is skipped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peer.config.files import sync, sync_entries
from peer.errors import RunError, UserError, of_disk
from peer.logs import get_logger

log = get_logger("checkpoint")

Tensors = dict[str, Tensor]
STATE = "state.json"
WEIGHTS_PART = "model"  # the part with θ
UNTRAINED_PART = "untrained"  # the model's frozen parameters and persistent buffers; missing where it has none
MODEL_PARTS = (WEIGHTS_PART, UNTRAINED_PART)  # what an export reads, and so a push
MODEL_FILES = (STATE, *(f"{part}.safetensors" for part in MODEL_PARTS))
PUSH_COPIES = 2  # of the model on the disk while a push runs: that of the checkpoint, and the exported one in fp32
NAMES_OF_OPEN_FILES = Path("/proc/self/fd")  # of this process, by number; macOS has none
LATEST = "latest"
TEMPORARY = ".tmp-"
BEFORE = "-before"  # suffix of a checkpoint that a new one of the same step replaces
# With another value of a key that the digest has, such as the learning rate, no checkpoint is resumed (but run.steps).
NEW_RUN_ADVICE = (
    "export it (noloco-peer export CHECKPOINT OUT), then begin a run with a new run.name and run.dir and "
    "run.model: {name: auto, source: OUT, pretrained: true}"
)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read. ``tensors``: by file, on the host; ``files``: as in :func:`load`."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, Tensors]
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """A checkpoint that may not be on the disk yet. ``state``: without the step and digests of :class:`Saved`."""

    step: int
    state: dict[str, Any]
    files: list[Path]


class Checkpoints:
    """The checkpoints of one peer."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def require_space(self, bytes_each: int, beside: int = 0) -> None:
        """The peer begins. Raise :class:`RunError` if :func:`disk_room` is less than the kept checkpoints, one more and
        ``beside`` bytes: a service tries again, and there may be room then. :class:`UserError` if the whole disk is too
        small.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put_back()
            found = disk_room(self.folder, bytes_each * self._keep)
        except OSError as error:
            raise of_disk(f"{self.folder}: cannot write checkpoints", error) from None
        needed = bytes_each * (self._keep + 1) + beside
        if found < needed:
            kind = RunError if needed <= shutil.disk_usage(self.folder).total else UserError
            raise kind(
                f"{self.folder}: no space for checkpoints: {needed / 2**30:.2f} GiB needed, "
                f"{found / 2**30:.2f} GiB free or in old checkpoints; "
                "free some, set run.dir to another disk, or lower peer.checkpoint.keep"
            )

    def free_bytes(self) -> float:
        """Free space on the disk, with that of a checkpoint that is being written; NaN when unknown."""
        try:
            return float(disk_room(self.folder, 0))
        except OSError:
            return math.nan

    def write(self, step: int, state: Mapping[str, Any], tensors: Iterable[tuple[str, Tensors]]) -> Written | None:
        """Write a checkpoint's files; then ``tensors`` may change. A disk's error is logged and gives ``None``."""
        temporary, files = self._temporary(step), []
        try:
            self._put_back()
            for left in self.folder.glob(f"{TEMPORARY}step_*"):
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir(parents=True)
            for part, content in tensors:
                files.append(temporary / f"{part}.safetensors")
                save_file({key: value.detach().cpu().contiguous() for key, value in content.items()}, files[-1])
        except (OSError, SafetensorError) as error:
            self._give_up(step, error)
            return None
        return Written(step, deepcopy(dict(state)), files)

    def publish(self, written: Written | None) -> bool:
        """Wait until all of it is on the disk, then make it the newest: in any thread, before the next :meth:`write`.
        An error of the disk is logged and gives ``False``.
        """
        if written is None:
            return False
        final, temporary = self.path(written.step), self._temporary(written.step)
        try:
            digests = {}
            for path in written.files:
                digests[path.name] = _digest(path)
                sync(path)
            whole = {**written.state, "step": written.step, "digests": digests}
            _write(temporary / STATE, json.dumps({"digest": _seal(whole), "state": whole}, indent=1))
            sync_entries(temporary)
            if final.exists():  # not removed before the rename: a kill must not lose the only one
                final.rename(self.folder / f"{TEMPORARY}{final.name}{BEFORE}")
            temporary.rename(final)
            pointer = self.folder / f"{TEMPORARY}{LATEST}"
            _write(pointer, final.name + "\n")
            pointer.rename(self.folder / LATEST)
            sync_entries(self.folder)
        except OSError as error:
            self._give_up(written.step, error)
            return False
        for old in (*self.all()[: -self._keep], *self.folder.glob(f"{TEMPORARY}step_*")):
            shutil.rmtree(old, ignore_errors=True)
        return True

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{TEMPORARY}{self.path(step).name}"

    def _give_up(self, step: int, error: Exception) -> None:
        shutil.rmtree(self._temporary(step), ignore_errors=True)
        log.error("checkpoint of step %d not saved: %s: %s", step, self.folder, error)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def all(self) -> list[Path]:
        """Folders of the checkpoints, oldest first. Steps after ``latest`` count as the oldest: the peer replaced them
        by the weights of a member in an earlier round, or a kill interrupted the save.
        """
        return self._in_order(self.folder.glob("step_*"))

    def _in_order(self, folders: Iterable[Path]) -> list[Path]:
        found = sorted((path for path in folders if path.is_dir()), key=lambda path: (_final_name(path), path.name))
        try:
            latest = (self.folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return found
        return sorted(found, key=lambda path: _final_name(path) <= latest)

    def newest(
        self,
        usable: Callable[[dict[str, Any]], str] = lambda state: "",
        parts: Collection[str] | None = None,
        held: ExitStack | None = None,
    ) -> Saved | None:
        """The newest undamaged checkpoint. ``usable`` returns why it cannot be used, which raises :class:`UserError`.

        ``parts``: as in :func:`load`. ``held``: as in :func:`keep_open`, for a reader beside the peer. It writes
        nothing: one that a save replaces at this moment, or that a kill has left so, is read where it is.
        """
        for path in reversed(self._in_order((*self._replaced(), *self.folder.glob("step_*")))):
            try:
                saved = load(path, parts, {} if held is None else keep_open(path, held))
            except (OSError, ValueError, KeyError) as error:
                log.warning("checkpoint %s is damaged, trying an older one: %s", path, error)
                continue
            if reason := usable(saved.state):
                raise UserError(f"{path}: {reason}")
            return saved
        return None

    def _put_back(self) -> None:
        """Restore a checkpoint if a kill interrupted its replacement."""
        for moved in self._replaced():
            final = self.folder / _final_name(moved)
            if not final.exists():
                moved.rename(final)

    def _replaced(self) -> Iterable[Path]:
        return self.folder.glob(f"{TEMPORARY}step_*{BEFORE}")


def how_to_go_on(folder: Path, *, saved: bool) -> str:
    """The end of an error that ends the peer in ``folder``, after its last save."""
    if saved:
        return "the state is saved, start again to go on"
    return f"the state is not saved in {folder}; free some space there, then start again from the newest checkpoint"


def disk_room(folder: Path, replaced: int) -> int:
    """Bytes for the checkpoints in ``folder``: the free ones, and those of old checkpoints, which new ones replace.

    ``replaced``: the most that old ones count. More of them do not help: they are removed only after the next save.
    """
    there = next(it for it in (folder, *folder.parents) if it.exists())
    half_written = sum(_size(path) for path in folder.glob(f"{TEMPORARY}step_*"))  # removed before the next save
    old = sum(_size(path) for path in folder.glob("step_*"))
    return shutil.disk_usage(there).free + half_written + min(old, replaced)


def _final_name(path: Path) -> str:
    return path.name.removeprefix(TEMPORARY).removesuffix(BEFORE)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder that has no folders; too few if it is not readable or is removed meanwhile."""
    size = 0
    with suppress(OSError):
        for path in folder.iterdir():
            size += path.stat().st_size
    return size


def load(path: Path, parts: Collection[str] | None = None, files: Mapping[str, Path] | None = None) -> Saved:
    """Read and verify one checkpoint, or only the files ``parts``. ``files``: those of :func:`keep_open`.

    Raises ``ValueError``, ``KeyError`` or ``OSError`` when it is damaged.
    """
    files = files or {}
    whole = json.loads(files.get(STATE, path / STATE).read_text(encoding="utf-8"))
    state = whole.get("state") if isinstance(whole, dict) else None
    if not isinstance(state, dict) or whole.get("digest") != _seal(state):
        raise ValueError(f"{STATE} does not match its digest")
    tensors = {}
    for name, digest in state["digests"].items():
        part = name.removesuffix(".safetensors")
        if parts is not None and part not in parts:
            continue
        file = files.get(name, path / name)
        if _digest(file) != digest:
            raise ValueError(f"{name} does not match its digest")
        tensors[part] = load_file(file)
    if missing := set(parts or ()) - tensors.keys() - {UNTRAINED_PART}:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    return Saved(path, state, tensors, files)


def keep_open(checkpoint: Path, held: ExitStack) -> dict[str, Path]:
    """Where the model's files of a checkpoint can be read until the end of ``held``, though newer checkpoints replace
    it. Open files leave nothing on the disk when this process is killed. Where a system has none by name: nothing.
    """
    files = {}
    for name in MODEL_FILES if NAMES_OF_OPEN_FILES.exists() else ():
        with suppress(OSError):  # it has nothing untrained; or the one who reads it says what is wrong
            opened = held.enter_context((checkpoint / name).open("rb"))
            files[name] = NAMES_OF_OPEN_FILES / str(opened.fileno())
    return files


def hold_model(checkpoint: Path, folder: Path) -> Path:
    """Links in ``folder`` to the checkpoint's files, which another process reads though newer checkpoints replace it:
    only to those of the model, for their bytes stay too. On a file system without links, the checkpoint itself.
    """
    held = folder / checkpoint.name
    try:
        held.mkdir(parents=True)
        for name in MODEL_FILES:
            if (checkpoint / name).exists():
                os.link((checkpoint / name).resolve(), held / name)
    except OSError:
        return checkpoint
    return held


def _seal(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
