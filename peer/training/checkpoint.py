"""Checkpoints: safetensors for tensors, JSON for the rest; no pickle.

    checkpoints/step_00000500/{model,optimizer,outer}.safetensors, state.json
    checkpoints/latest        the name of the newest one

A checkpoint is written into a temporary folder, synced to disk and renamed, so what has its final name is whole.
``state.json`` holds a digest of every file and of itself; a damaged checkpoint is skipped for the one before.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("checkpoint")

Tensors = dict[str, Tensor]
STATE = "state.json"
LATEST = "latest"
TEMPORARY = ".tmp-"
BEFORE = "-before"  # ends the name of what a new checkpoint of the same step is about to replace


@dataclass(frozen=True)
class Saved:
    """A checkpoint as read: ``tensors`` by file (model, optimizer, outer), all on the host."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, Tensors]


class Checkpoints:
    """The checkpoints of one peer."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def require_space(self, bytes_each: int) -> None:
        """Raise :class:`UserError` unless all checkpoints that will be kept, and one in the making, fit."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise UserError(f"{self.folder}: cannot write checkpoints: {error.strerror}") from None
        needed = bytes_each * (self._keep + 1)
        if free < needed:
            raise UserError(
                f"{self.folder}: no space for checkpoints: {needed / 2**30:.2f} GiB needed, "
                f"{free / 2**30:.2f} GiB free; "
                "free some, set run.dir to another disk, or lower peer.checkpoint.keep"
            )

    def free_bytes(self) -> float:
        """Room on the disk; not a number when it cannot be read."""
        try:
            return float(shutil.disk_usage(self.folder).free)
        except OSError:
            return math.nan

    def save(self, step: int, state: Mapping[str, Any], tensors: Iterable[tuple[str, Tensors]]) -> bool:
        """Write one checkpoint, ``tensors`` by file. ``False``, and a line in the log, when the disk refuses it."""
        name = f"step_{step:08d}"
        temporary, final = self.folder / f"{TEMPORARY}{name}", self.folder / name
        try:
            self._put_back()
            for left in self.folder.glob(f"{TEMPORARY}step_*"):
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir(parents=True)
            digests = {}
            for part, content in tensors:
                path = temporary / f"{part}.safetensors"
                save_file({key: value.detach().cpu().contiguous() for key, value in content.items()}, path)
                digests[path.name] = _digest(path)
                _sync(path)
            whole = {**state, "step": step, "digests": digests}
            _write(temporary / STATE, json.dumps({"digest": _seal(whole), "state": whole}, indent=1))
            _sync(temporary)
            if final.exists():  # moved and not removed: a kill in between must not cost the only one
                final.rename(self.folder / f"{TEMPORARY}{name}{BEFORE}")
            temporary.rename(final)
            pointer = self.folder / f"{TEMPORARY}{LATEST}"
            _write(pointer, name + "\n")
            pointer.rename(self.folder / LATEST)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            log.error("checkpoint of step %d not saved, training goes on: %s: %s", step, self.folder, error)
            return False
        for old in (*self.all()[: -self._keep], *self.folder.glob(f"{TEMPORARY}step_*")):
            shutil.rmtree(old, ignore_errors=True)
        return True

    def all(self) -> list[Path]:
        """Folders of the checkpoints, oldest first. Those beyond ``latest`` are the oldest: the peer has given them up
        for the weights of others, who were less far, or was killed before it had finished the save.
        """
        found = sorted(path for path in self.folder.glob("step_*") if path.is_dir())
        try:
            latest = (self.folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return found
        return sorted(found, key=lambda path: path.name <= latest)

    def newest(
        self, usable: Callable[[dict[str, Any]], str] = lambda state: "", parts: Collection[str] | None = None
    ) -> Saved | None:
        """The newest checkpoint that is whole; ``usable`` names a reason to refuse one (a :class:`UserError`).

        ``parts``: as in :func:`load`.
        """
        self._put_back()
        for path in reversed(self.all()):
            try:
                saved = load(path, parts)
            except (OSError, ValueError, KeyError) as error:
                log.warning("checkpoint %s is damaged, taking the one before: %s", path, error)
                continue
            reason = usable(saved.state)
            if reason:
                raise UserError(f"{path}: {reason}")
            return saved
        return None

    def _put_back(self) -> None:
        """A kill came between moving a checkpoint away and putting the new one of the same step in its place."""
        for moved in self.folder.glob(f"{TEMPORARY}step_*{BEFORE}"):
            final = self.folder / moved.name.removeprefix(TEMPORARY).removesuffix(BEFORE)
            if not final.exists():
                moved.rename(final)


def load(path: Path, parts: Collection[str] | None = None) -> Saved:
    """Read and verify one checkpoint, or with ``parts`` these files of it alone.

    Raises ``ValueError``, ``KeyError`` or ``OSError`` when it is not whole.
    """
    whole = json.loads((path / STATE).read_text(encoding="utf-8"))
    state = whole.get("state") if isinstance(whole, dict) else None
    if not isinstance(state, dict) or whole.get("digest") != _seal(state):
        raise ValueError(f"{STATE} does not match its digest")
    tensors = {}
    for name, digest in state["digests"].items():
        if parts is not None and name.removesuffix(".safetensors") not in parts:
            continue
        if _digest(path / name) != digest:
            raise ValueError(f"{name} does not match its digest")
        tensors[name.removesuffix(".safetensors")] = load_file(path / name)
    if parts is not None and set(parts) - tensors.keys():
        raise ValueError(f"it has no {', '.join(sorted(set(parts) - tensors.keys()))}")
    return Saved(path, state, tensors)


def _seal(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
