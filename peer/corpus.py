"""Text into tokens: where a run's words come from. Byte-level: token = byte, 256 separates documents."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer.config import StdlibData, TextData
from peer.errors import UserError

VOCABULARY = 257
SEPARATOR = 256
HELD_OUT = 20  # every 20th document is validation
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PIECE = 64 * 1024  # bytes; a text file is cut into documents of this size, so that one file can be split too

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Corpus:
    """Tokens of both splits, 1-D uint16."""

    train: Tokens
    validation: Tokens


def load(settings: StdlibData | TextData) -> Corpus:
    """Read and tokenise. Raises :class:`UserError` for missing, unreadable or too little text."""
    if isinstance(settings, StdlibData):
        corpus = _split(_stdlib())
    elif settings.validation:
        train, validation = _files(settings.train, "train"), _files(settings.validation, "validation")
        corpus = Corpus(_tokens(text for _, text in train), _tokens(text for _, text in validation))
    else:
        corpus = _split(_files(settings.train, "train"))
    for split, tokens in (("train", corpus.train), ("validation", corpus.validation)):
        if len(tokens) < settings.sequence_length + 2:
            raise UserError(
                f"run.data: the {split} split has {len(tokens)} tokens, too few for one sequence of "
                f"{settings.sequence_length}; add text or lower run.data.sequence_length"
            )
    return corpus


def _stdlib() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = False
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)  # before going down: site-packages can be huge
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            found = True
            yield str(path.relative_to(root)), path.read_bytes()
    if not found:
        raise UserError(f"run.data: {root} has no Python sources; use run.data.name: text with your own files")


def _files(patterns: Iterable[str], key: str) -> Iterator[tuple[str, bytes]]:
    for pattern in patterns:
        try:
            full = Path(pattern).expanduser().absolute()
            found = Path(full.anchor).glob(str(full.relative_to(full.anchor)))
            paths = sorted(path for path in found if path.is_file())
        except (ValueError, RuntimeError, IndexError, OSError) as error:
            raise UserError(f"run.data.{key}: {pattern!r} is not a pattern: {error}") from None
        if not paths:
            raise UserError(f"run.data.{key}: no file matches {pattern}")
        for path in paths:
            try:
                data = path.read_bytes()
            except OSError as error:
                raise UserError(f"run.data.{key}: cannot read {path}: {error.strerror}") from None
            for start in range(0, len(data), PIECE):
                yield f"{path.name}:{start}", data[start : start + PIECE]


def _split(documents: Iterable[tuple[str, bytes]]) -> Corpus:
    """By document and name, so that the same files give the same splits on every machine."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for name, text in documents:
        held_out = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0
        sides[held_out].append(text)
    return Corpus(_tokens(sides[0]), _tokens(sides[1]))


def _tokens(documents: Iterable[bytes]) -> Tokens:
    pieces: list[Tokens] = []
    for text in documents:
        pieces.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
        pieces.append(np.array([SEPARATOR], dtype=np.uint16))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16)
